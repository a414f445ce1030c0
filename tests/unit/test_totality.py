"""Every argument of Megatron-LM 0.12 to 0.20 is mapped, has a neutral value, or is known to change nothing."""

from __future__ import annotations

import pytest

from fixtures import megatron_flags
from mcore_convert.checkpoints.families import families, remarks
from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.spec import gpt, hybrid
from mcore_convert.spec.config import arguments
from mcore_convert.spec.config.arguments import YARN_DEFAULTS
from mcore_convert.spec.config.latent import WITHOUT_FLAG
from mcore_convert.spec.config.neutral import NEUTRAL, NEUTRAL_OF_EXPERTS
from mcore_convert.spec.config.without_effect import OF_RUNS, WITHOUT_EFFECT
from tests.conftest import real_checkpoint


def mapped() -> set[str]:
    """Return what the fields of some family answer for: of all others it must be neutral."""
    mappings = (family.config for family in families().values())
    return {name for mapping in mappings for field in mapping.fields for name in field.megatron}


@pytest.mark.parametrize("version", megatron_flags.VERSIONS)
def test_every_argument_is_accounted_for(version: str) -> None:
    checked = {*NEUTRAL, *NEUTRAL_OF_EXPERTS, *gpt.UNKNOWN, *gpt.WEIGHT_SHARDS}
    known = mapped() | checked | set(WITHOUT_EFFECT)
    assert [row["dest"] for row in megatron_flags.rows(version) if row["dest"] not in known] == []


def test_what_is_mapped_by_some_families_is_neutral_for_the_others() -> None:
    """But for sizes and what every family states, an argument that a field claims is checked where no field does."""
    everywhere = set.intersection(
        *({name for field in family.config.fields for name in field.megatron} for family in families().values())
    )
    values = {
        "fp16",
        "bf16",
        "attention_dropout",
        "hidden_dropout",
        "bias_dropout_fusion",
        "moe_grouped_gemm",
    }  # how a model is computed and trained
    beside = {  # what another argument switches on, which is checked
        "rotary_base", "rope_scaling_factor", "bias_gelu_fusion", "num_experts", "ffn_hidden_size", "window_size",
        "num_query_groups", "group_query_attention", "kv_channels",
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads",
        *hybrid.SIZES,
        "rotary_scaling_factor", "mscale", "mscale_all_dim", *WITHOUT_FLAG, *YARN_DEFAULTS,
    }  # fmt: skip
    unchecked = mapped() - everywhere - values - beside - NEUTRAL.keys() - NEUTRAL_OF_EXPERTS.keys()
    assert unchecked == set()


def test_nothing_stands_in_two_lists() -> None:
    listed = WITHOUT_EFFECT
    assert len(set(listed)) == len(listed)
    assert {*listed, *OF_RUNS}.isdisjoint({*NEUTRAL, *NEUTRAL_OF_EXPERTS, *mapped()})
    assert OF_RUNS.isdisjoint(listed)
    parsed = {row["dest"] for version in megatron_flags.VERSIONS for row in megatron_flags.rows(version)}
    assert set(listed) <= parsed, "no version has it"


def test_an_argument_that_no_release_has_is_reported() -> None:
    """A release to come, or a fork, may change the model by an argument that nobody knows yet."""
    assert remarks({"num_layers": 4, "rank": 3, "moe_new_router": False, "moe_newer_router": None, "_private": 1}) == []
    [note] = remarks({"moe_new_router": "x", **{f"new_{number}": number for number in range(1, 10)}})
    assert note.endswith('are taken to change nothing: `moe_new_router` = "x", `new_1` = 1, `new_2` = 2, `new_3` = 3, '
                         "`new_4` = 4, `new_5` = 5, `new_6` = 6, `new_7` = 7, and 2 more")  # fmt: skip


@pytest.mark.parametrize(
    "name", ["llama_legacy_tp2pp2", "m19_llama_tp2pp2", "transformer_engine_names/v0.12.0_llama_te_torch"]
)
def test_real_runs_have_no_such_arguments(name: str) -> None:
    args = open_checkpoint(real_checkpoint(name)).common.args
    assert args is not None
    assert remarks(arguments.normalise(args)) == []
