"""An entry point of another package that cannot be loaded breaks no command; it is refused where it is asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mcore_convert import convert, inspect, verify
from mcore_convert.checkpoints import families
from mcore_convert.errors import ConfigError, ConvertError, UnreadableCheckpoint
from mcore_convert.formats import registry
from tests.conftest import HfMaker
from tests.refusals import run

BROKEN = ("gone = no.such.package:FAMILY", "wrong = json:dumps", "other = converters.llama:FAMILY")


def forget() -> None:
    for cached in (families.plugins, families.families, families.unrepresented, registry.plugins, registry.formats):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three broken entry points beside those that are there, in each group."""
    for module in (families, registry):
        real: Any = module.entry_points

        def points(group: str, real: Any = real) -> list[EntryPoint]:
            words = [line.split(" = ") for line in BROKEN]
            return [*(EntryPoint(name, value, group) for name, value in words), *real(group=group)]

        monkeypatch.setattr(module, "entry_points", points)
    forget()
    yield
    forget()


def test_commands_go_on_with_a_warning(
    hf_checkpoint: HfMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = hf_checkpoint("gpt2")
    with caplog.at_level(logging.WARNING, "mcore_convert"):
        convert(source, tmp_path / "dist")
        assert verify(source, tmp_path / "dist").equal
    assert inspect(tmp_path / "dist").family == "gpt2"
    names = [line.partition(" = ")[0] for line in BROKEN]
    wanted = [f"the {noun} `{name}` cannot be loaded" for noun in ("format", "family") for name in names]
    warnings = [record.getMessage() for record in caplog.records]
    for words in wanted:
        assert sum(line.startswith(words) for line in warnings) == 1, words  # once, and not at every look
    assert "the family `gone` cannot be loaded: ModuleNotFoundError: No module named 'no'" in warnings
    assert "the family `other` cannot be loaded: `converters.llama:FAMILY` is no family of that name" in warnings
    code, out, _ = run("families", "--json")
    assert code == 0
    assert {"gpt2", "llama"} <= {*json.loads(out)}
    assert not {"gone", "wrong", "other"} & {*json.loads(out)}


@pytest.mark.parametrize("name", ["gone", "wrong", "other"])
def test_what_is_asked_for_by_name_is_refused(name: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2")
    with pytest.raises(ConfigError, match=f"the family `{name}` cannot be loaded") as caught:
        convert(source, tmp_path / "out", family=name)
    assert caught.value.hint == "repair or uninstall the package that has it"
    with pytest.raises(ConvertError, match=f"the format `{name}` cannot be loaded"):
        convert(source, tmp_path / "out", to=name)


def test_what_nothing_else_reads_names_what_could_not_be_loaded(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    with pytest.raises(UnreadableCheckpoint, match="no checkpoint in a known format") as caught:
        inspect(tmp_path / "strange")
    assert len(caught.value.items) == 3
    with pytest.raises(ConfigError, match="no family reads a model") as refused:
        families.of_config({"architectures": ["StrangeForCausalLM"]})
    assert refused.value.items[0].startswith("the family `gone` cannot be loaded")
