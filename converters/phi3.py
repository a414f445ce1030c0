"""Phi-3 and Phi-4 without longrope: Llama with q, k, v in one tensor, gate and up in another, and partial rotation."""

from converters import llama
from mcore_convert.spec import QKV, ConfigMapping, Family, Fused, column, gated_column, vary
from mcore_convert.spec.config.fields import constant, inert, same, sliding_window
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "phi3",
    ("Phi3ForCausalLM",),
    vary.fields(
        llama.SHARED,
        rope(percent=1.0, kinds=("default",)),
        sliding_window(default=None),
        constant(add_qkv_bias=False),
        same("resid_pdrop", "hidden_dropout", kind=float, default=0.0),
        inert(original_max_position_embeddings=4096),  # used by longrope only
        inert(embd_pdrop=0.0),  # not used by any layer of transformers
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
)
M, H = llama.M, llama.H
WEIGHTS = vary.weights(
    llama.WITHOUT_BIAS,
    column(M + "self_attention.linear_qkv.weight", "qkv hidden", H + "self_attn.qkv_proj.weight", pack=Fused(QKV())),
    gated_column(M + "mlp.linear_fc1.weight", "gated_ffn hidden", H + "mlp.gate_up_proj.weight"),
)
FAMILY = Family("phi3", ("Phi3ForCausalLM",), CONFIG, WEIGHTS, prevalence=60)
