"""Qwen3.5, the text model: Qwen3-Next with one MLP per layer, and other names in the gated delta rule."""

from converters import qwen3_next
from mcore_convert.spec import ConfigMapping, Family, Segments, vary
from mcore_convert.spec.config.fields import inert, only
from mcore_convert.spec.config.linear import predicted_token
from mcore_convert.spec.config.mapping import Field
from mcore_convert.spec.config.rope import rope
from mcore_convert.spec.gpt import IN_PROJ

OWN: tuple[Field, ...] = (
    # text has the same position in all three dimensions, so the sections have no effect
    rope(percent=0.25, inert=("mrope_section", "mrope_interleaved")),
    predicted_token("mtp_num_hidden_layers"),
    only("attn_output_gate", True, write=False),
    only("mtp_use_dedicated_embeddings", False, write=False),
    inert(mamba_ssm_dtype="float32"),  # precision of another program's kernel
)
CONFIG = ConfigMapping(
    "qwen3_5_text",
    ("Qwen3_5ForCausalLM",),
    vary.fields(
        qwen3_next.SHARED,
        *OWN,
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=32768,
    ),
)
QKVZ, BA = tuple(IN_PROJ.values())[:4], tuple(IN_PROJ.values())[4:]
LINEAR = qwen3_next.linear_attention(
    Segments((QKVZ[:3], QKVZ[3:], BA[:1], BA[1:])),
    "qkv", "z", "b", "a",
)  # fmt: skip
FAMILY = Family("qwen3_5", ("Qwen3_5ForCausalLM",), CONFIG, qwen3_next.rows(LINEAR, *qwen3_next.DENSE), prevalence=68)
