"""StableLM 2 without parallel residuals: Llama with LayerNorms and partial rotation of heads."""

from converters import llama
from mcore_convert.spec import ConfigMapping, Family, vary
from mcore_convert.spec.config.fields import constant, only, same, shared_heads
from mcore_convert.spec.config.rope import rope

CONFIG = ConfigMapping(
    "stablelm",
    ("StableLmForCausalLM",),
    vary.fields(
        llama.SHARED,
        same("layer_norm_eps", "layernorm_epsilon", kind=float, default=1e-5),
        shared_heads(),
        rope(percent=0.25),
        constant(normalization="LayerNorm", position_embedding_type="rope", swiglu=True, add_bias_linear=False),
        same("use_qkv_bias", "add_qkv_bias", kind=bool, default=False),
        only("use_parallel_residual", False),
        only("qk_layernorm", False),
        same("hidden_dropout", "hidden_dropout", kind=float, default=0.0),
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=6912,
        num_key_value_heads=32,
        max_position_embeddings=4096,
    ),
)
FAMILY = Family(
    "stablelm", ("StableLmForCausalLM",), CONFIG, vary.with_biases(llama.WITH_QKV_BIAS, "norm"), prevalence=25
)
