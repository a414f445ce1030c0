"""Every installed family, by its tiny configurations: through every format and layout, to the same bytes and logits.

A family is tested by its entry point and a file in fixtures/configs; fixtures/families.py has what goes where.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from fixtures.families import FAMILY_OF, MATRIX, ONE_OF_EACH, RANKS, Layout
from fixtures.hf import CONFIGS, VARIANTS
from fixtures.megatron_flags import parse
from mcore_convert import convert, verify
from mcore_convert.checkpoints.families import families, of_config
from mcore_convert.checkpoints.identify import identify
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.command_line import caveats, command_line
from mcore_convert.spec.config.mapping import REQUIRED, ConfigMapping, Refused
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.names import spell
from tests.conftest import HfMaker
from tests.oracle.test_megatron_load import check_logits
from tests.tensors import assert_same_tensors, hf_tensors


def test_every_family_has_a_tiny_configuration() -> None:
    assert sorted(set(FAMILY_OF.values())) == sorted(families())


def mappings() -> list[ConfigMapping]:
    return [mapping for family in families().values() for mapping in (family.config, *family.config.dialects)]


@pytest.mark.parametrize("mapping", mappings(), ids=lambda mapping: mapping.model_type)
def test_what_an_absent_key_means_is_the_class_default_of_transformers(mapping: ConfigMapping) -> None:
    read_by = [family.config for family in families().values() if mapping in (family.config, *family.config.dialects)]
    kind = mapping.model_type if mapping.model_type in CONFIG_MAPPING else read_by[0].model_type  # as code of its own
    theirs = AutoConfig.for_model(kind).to_dict()
    for field in mapping.fields:
        for key, default in field.hf.items():
            if default is not REQUIRED and default is not None and key in theirs:
                assert default == theirs[key] or theirs[key] is None, key
    whole = {key: value for key, value in theirs.items() if key != "architectures"}
    assert meaning(mapping, {}) == meaning(mapping, whole)


def meaning(mapping: ConfigMapping, config: dict[str, Any]) -> list[Any]:
    """Return what each field makes of a configuration with the defaults of the mapping, or why it refuses it."""
    absent = {key: value for field in mapping.fields for key, value in field.hf.items() if value is not REQUIRED}
    result: list[Any] = []
    for field in mapping.fields:
        try:
            result.append(field.to_megatron({**absent, **config}))
        except Refused as refused:
            result.append(refused.lines)
    return result


@pytest.mark.parametrize(
    ("name", "to", "layout"),
    MATRIX,
    ids=["-".join([name, to, *(f"{key}{value}" for key, value in layout.items())]) for name, to, layout in MATRIX],
)
def test_there_and_back_in_any_format(
    name: str, to: str, layout: Layout, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = hf_checkpoint(name)
    model = identify(source)
    if model.dims.num_query_groups % layout.get("tp", 1):
        layout = {**layout, "tp": 1}
    convert(source, tmp_path / "megatron", to=to, **layout)
    convert(tmp_path / "megatron", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_megatron_core_computes_what_transformers_does(name: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """And the configuration comes back from the arguments alone, as for a checkpoint that Megatron trained on."""
    source = hf_checkpoint(name, fill="normal")
    convert(source, tmp_path / "out")
    check_logits(source, tmp_path / "out", 1, 1)
    shutil.rmtree(tmp_path / "out/release/hf")
    convert(tmp_path / "out", tmp_path / "back", family=FAMILY_OF[name])
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    result = verify(source, tmp_path / "back")
    assert result.equal
    assert not result.config_differences


@pytest.mark.parametrize(("name", "tp", "pp"), RANKS)
def test_ranks_compute_it_together(name: str, tp: int, pp: int, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint(name, fill="normal")
    convert(source, tmp_path / "out")
    check_logits(source, tmp_path / "out", tp, pp)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_printed_flags_describe_the_whole_model(name: str) -> None:
    """Parsed as Megatron-LM parses them, with its defaults for the rest, they become the same `config.json`."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    family = of_config(config)
    args = normalise(family.config.to_megatron(config))
    line = command_line(args)
    given = vars(parse(shlex.join(line), "0.19"))
    parsed = normalise({**given, "vocab_size": args["vocab_size"], "tokenizer_type": None})
    assert not family.config.refusals(parsed)
    assert family.config.to_hf(parsed) == family.config.to_hf(args)
    young = {"--window-size": "window_size", "--no-rope-freq": "no_rope_freq"}
    young |= {"--experimental-attention-variant": "experimental_attention_variant"}
    young |= {"--attention-output-gate": "attention_output_gate"}
    for flag, argument in young.items():
        assert (flag in line) == any(caveat.startswith(f"`{argument}`") for caveat in caveats(args))


@pytest.mark.parametrize("name", VARIANTS)
def test_families_that_fit_one_model_stand_in_an_order(name: str) -> None:
    """Or nothing would decide which of them a Megatron checkpoint is taken for."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    args = normalise(of_config(config).config.to_megatron(config))
    ranks = [family.prevalence for family in families().values() if not family.config.refusals(args)]
    assert ranks
    assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_no_two_rows_have_one_name(name: str, hf_checkpoint: HfMaker) -> None:
    model = identify(hf_checkpoint(name))
    dims: Dims = model.dims
    placed = list(model.family.instances(dims))
    for names in (
        [row.name for row in {row for row, _ in placed}],
        [spell(key, at) for row, at in placed for key in row.hf if not (at.expert and row.is_joined(key))],
    ):
        assert len(set(names)) == len(names)
