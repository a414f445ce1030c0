"""Mixtral: Mistral with experts instead of MLPs, under names of its own."""

from converters import llama, mistral
from mcore_convert.spec import Concat, ConfigMapping, Family, Spelling, gated_column, replicated, row, vary
from mcore_convert.spec.config.fields import inert, sliding_window
from mcore_convert.spec.config.rope import rope
from mcore_convert.spec.experts import every_layer, expert_size, num_experts, router
from mcore_convert.spec.layers import EXPERTS

CONFIG = ConfigMapping(
    "mixtral",
    ("MixtralForCausalLM",),
    vary.fields(
        mistral.CONFIG.fields,
        sliding_window(default=None),
        rope(theta=1000000.0),
        num_experts("num_local_experts", other="num_experts", default=8),
        expert_size("intermediate_size", default=14336, of_mlp=True),
        router(default=2, normed=True),
        every_layer(),
        inert(output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0),  # of training
        rms_norm_eps=1e-5,
    ),
)
# transformers 5 uses the name `mlp` if all experts of a layer are in one tensor.
M, H, MLP = llama.M + "mlp.", llama.H + "block_sparse_moe.", llama.H + "mlp."
ROWS = (
    replicated(llama.M + "pre_mlp_layernorm.weight", "hidden", llama.H + "post_attention_layernorm.weight"),
    replicated(M + "router.weight", "experts hidden", H + "gate.weight", also=(Spelling((MLP + "gate.weight",)),)),
    gated_column(
        M + "experts.experts.{expert}.linear_fc1.weight",
        "gated_moe_ffn hidden",
        H + "experts.{expert}.w1.weight",
        H + "experts.{expert}.w3.weight",
        pack=Concat(),
        also=(Spelling((MLP + "experts.gate_up_proj",)),),
    ),
    row(
        M + "experts.experts.{expert}.linear_fc2.weight",
        "hidden moe_ffn",
        H + "experts.{expert}.w2.weight",
        also=(Spelling((MLP + "experts.down_proj",)),),
    ),
)
DENSE = [weight.name for weight in llama.WITHOUT_BIAS if M in weight.name]
WEIGHTS = vary.weights(
    llama.WITHOUT_BIAS, *vary.of_part(EXPERTS, ROWS), without=DENSE, after=llama.M + "self_attention.linear_proj.weight"
)
FAMILY = Family("mixtral", ("MixtralForCausalLM",), CONFIG, WEIGHTS, prevalence=80)
