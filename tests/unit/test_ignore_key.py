"""`--ignore-key`: every command accepts an unknown key of `config.json` on a user's word, and never in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mcore_convert import convert, export, iter_hf_weights
from mcore_convert.errors import ConfigError
from tests.conftest import HfMaker
from tests.refusals import run
from tests.tensors import assert_same_tensors, hf_tensors

KEY, IGNORE = "internal_version", ("--ignore-key", "internal_version")
NOTE = 'config.json: `internal_version` = "alpha" is taken to change nothing, as --ignore-key says'


@pytest.fixture
def source(hf_checkpoint: HfMaker, tmp_path: Path) -> Path:
    path = shutil.copytree(hf_checkpoint("llama-gqa"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, KEY: "alpha"}))
    return path


def test_every_command_that_reads_a_configuration_takes_it(source: Path, tmp_path: Path) -> None:
    dist, back, again = tmp_path / "dist", tmp_path / "back", tmp_path / "again"
    commands = [
        ("convert", source, dist),
        ("convert", dist, back),
        ("verify", source, dist),
        ("diff", source, dist),
        ("inspect", source),
        ("export", source, again),
    ]
    for command in commands:
        refused = run(*command)
        if command[0] != "inspect":  # which says what it can of any directory
            assert refused.code != 0
            assert 'unknown key `internal_version` = "alpha"' in refused.err
        ended = run(*command, *IGNORE)
        assert ended.code == 0, ended.err
        assert NOTE in ended.out + ended.err
    assert_same_tensors(hf_tensors(back), hf_tensors(source))
    assert json.loads((back / "config.json").read_text())[KEY] == "alpha"  # others may know what it says


def test_the_card_names_it(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out", ignore_keys=[KEY])
    card = (tmp_path / "out/README.md").read_text()
    assert 'unknown keys of `config.json`, taken to change nothing | `internal_version` = "alpha"' in card
    assert len(dict(iter_hf_weights(source, ignore_keys=[KEY]))) == len(hf_tensors(source))


def test_a_run_starts_from_such_a_model_where_its_configuration_says_so(source: Path) -> None:
    from train_entry.checkpoints.source import source_of
    from train_entry.config.schema import Config

    for keys in ((KEY,), ()):
        config = Config.model_validate({"checkpoint": {"init": str(source), "ignore_keys": keys}})
        if keys:
            start = source_of(config)
            assert start is not None
            assert start.model.ignored == ('`internal_version` = "alpha"',)
        else:
            with pytest.raises(ConfigError, match="unknown key"):
                source_of(config)


def test_a_known_key_is_not_ignored(source: Path, tmp_path: Path) -> None:
    for key in ("rope_scaling", "quantization_config", "use_cache"):
        with pytest.raises(ConfigError, match=f"`{key}` is known"):
            convert(source, tmp_path / "out", ignore_keys=[KEY, key])
