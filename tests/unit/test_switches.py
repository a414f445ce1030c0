"""Each size or switch beside another argument has one that must be neutral."""

from __future__ import annotations

import pytest

from mcore_convert.spec.config.neutral import NEUTRAL, NEUTRAL_OF_EXPERTS
from mcore_convert.spec.config.without_effect import WITHOUT_EFFECT

# The first words of such arguments, and the argument without which they say nothing.
BESIDE = {
    "dsa_": "experimental_attention_variant",
    "kitchen_attention": "use_kitchen_attention",
    "mla_": "multi_latent_attention",
    "relative_attention": "position_embedding_type",
    "mamba_": "is_hybrid_model",
    "mtp_": "mtp_num_layers",
    "mup_": "use_mup",
    "retro_": "retro_add_retriever",
    "moe_token_drop": "moe_expert_capacity_factor",
    "moe_pad_expert_input": "moe_expert_capacity_factor",
    "moe_router_quantile": "moe_router_load_balancing_type",
}


@pytest.mark.parametrize("words", BESIDE)
def test_a_size_has_a_switch_that_is_checked(words: str) -> None:
    assert any(name.startswith(words) for name in WITHOUT_EFFECT), "no such argument is listed"
    assert BESIDE[words] in {*NEUTRAL, *NEUTRAL_OF_EXPERTS}


@pytest.mark.parametrize(
    "name",
    """
    softmax_type window_attn_skip_freq no_rope_freq heterogeneous_layers_config_path glu_linear_offset
    attention_output_gate apply_residual_connection_post_layernorm activation_func_clamp_value qk_l2_norm
    mup_embedding_mult use_mup
    """.split(),  # noqa: SIM905
)
def test_what_changes_the_function_is_not_listed(name: str) -> None:
    assert name in NEUTRAL
    assert name not in WITHOUT_EFFECT
