"""Every argument of Megatron-LM 0.12, 0.16 and 0.19 is mapped, has a neutral value, or is known to change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures import megatron_flags
from mcore_convert.checkpoints.families import families
from mcore_convert.spec import gpt, hybrid
from mcore_convert.spec.config.arguments import YARN_DEFAULTS
from mcore_convert.spec.config.latent import WITHOUT_FLAG
from mcore_convert.spec.config.neutral import NEUTRAL, NEUTRAL_OF_EXPERTS

# One argument a line under the reason why it changes no function, and no weight.
WITHOUT_EFFECT = Path(megatron_flags.__file__).parent / "without_effect.txt"


def without_effect() -> list[str]:
    lines = WITHOUT_EFFECT.read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def mapped() -> set[str]:
    """Return what the fields of some family answer for: of all others it must be neutral."""
    mappings = (family.config for family in families().values())
    return {name for mapping in mappings for field in mapping.fields for name in field.megatron}


@pytest.mark.parametrize("version", megatron_flags.VERSIONS)
def test_every_argument_is_accounted_for(version: str) -> None:
    checked = {*NEUTRAL, *NEUTRAL_OF_EXPERTS, *gpt.UNKNOWN, *gpt.WEIGHT_SHARDS}
    known = mapped() | checked | set(without_effect())
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
    listed = without_effect()
    assert len(set(listed)) == len(listed)
    assert set(listed).isdisjoint({*NEUTRAL, *NEUTRAL_OF_EXPERTS, *mapped()})
    parsed = {row["dest"] for version in megatron_flags.VERSIONS for row in megatron_flags.rows(version)}
    assert set(listed) <= parsed, "no version has it"


def test_a_new_argument_would_fail() -> None:
    assert "moe_new_router" not in mapped() | {*NEUTRAL, *NEUTRAL_OF_EXPERTS, *without_effect()}
