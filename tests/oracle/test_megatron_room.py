"""A `GPTModel` built from Megatron-LM arguments computes what transformers computes; the mapping here is by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_convert.megatron.logits import logits
from mcore_convert.megatron.model import build_model
from mcore_convert.megatron.weights import load_weights

VOCAB, LENGTH, HIDDEN, LAYERS, HEADS, FFN = 96, 24, 32, 2, 4, 88


TOLERANCE = 2e-5  # of float32 logits whose scale is about 5; 4e-6 is what is seen


Weights = dict[str, Tensor]


GPT2: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 4 * HIDDEN,
    "num_attention_heads": HEADS,
    "kv_channels": HIDDEN // HEADS,
    "group_query_attention": False,
    "num_query_groups": 1,  # what Megatron-LM stores without grouped queries
    "max_position_embeddings": LENGTH,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "untie_embeddings_and_output_weights": False,
    "padded_vocab_size": VOCAB,
    "tensor_model_parallel_size": 8,  # how it was trained says nothing about how it is built
    "pipeline_model_parallel_size": 4,
}


LLAMA: dict[str, Any] = {
    **GPT2,
    "ffn_hidden_size": FFN,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def randomised(model: Any) -> Any:
    """Return every parameter random: transformers starts with zero biases and unit norms,
    which would hide a wrong mapping.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.15 * noise)
    return model.eval()


def gpt2(activation: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return randomised(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=LENGTH,
                n_embd=HIDDEN,
                n_layer=LAYERS,
                n_head=HEADS,
                activation_function=activation,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


def llama(rope: dict[str, Any] | None = None, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072 if rope else LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})},
        **settings,
    }
    model = randomised(LlamaForCausalLM(LlamaConfig(**config)))
    if settings.get("attention_bias"):  # Megatron Core has no bias of linear_proj alone
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.data.zero_()
    return model


def qkv(projections: Sequence[Tensor], head: int) -> Tensor:
    """q, k and v as one. Per query group: its query heads, its key head, its value head."""
    heads = [part.split(head) for part in projections]
    groups, share = len(heads[1]), len(heads[0]) // len(heads[1])
    rows: list[Tensor] = []
    for group in range(groups):
        rows += [*heads[0][group * share : (group + 1) * share], heads[1][group], heads[2][group]]
    return torch.cat(rows)


def gpt2_weights(model: Any) -> Weights:
    t = model.transformer
    out = {
        "embedding.word_embeddings.weight": t.wte.weight,
        "embedding.position_embeddings.weight": t.wpe.weight,
        "decoder.final_layernorm.weight": t.ln_f.weight,
        "decoder.final_layernorm.bias": t.ln_f.bias,
    }
    for index, block in enumerate(t.h):
        at, qkv_of = f"decoder.layers.{index}.", block.attn.c_attn
        out |= {
            at + "self_attention.linear_qkv.layer_norm_weight": block.ln_1.weight,
            at + "self_attention.linear_qkv.layer_norm_bias": block.ln_1.bias,
            at + "self_attention.linear_qkv.weight": qkv(qkv_of.weight.t().chunk(3), HIDDEN // HEADS),
            at + "self_attention.linear_qkv.bias": qkv(qkv_of.bias.chunk(3), HIDDEN // HEADS),
            at + "self_attention.linear_proj.weight": block.attn.c_proj.weight.t(),
            at + "self_attention.linear_proj.bias": block.attn.c_proj.bias,
            at + "mlp.linear_fc1.layer_norm_weight": block.ln_2.weight,
            at + "mlp.linear_fc1.layer_norm_bias": block.ln_2.bias,
            at + "mlp.linear_fc1.weight": block.mlp.c_fc.weight.t(),
            at + "mlp.linear_fc1.bias": block.mlp.c_fc.bias,
            at + "mlp.linear_fc2.weight": block.mlp.c_proj.weight.t(),
            at + "mlp.linear_fc2.bias": block.mlp.c_proj.bias,
        }
    return {name: tensor.detach() for name, tensor in out.items()}


def llama_weights(model: Any) -> Weights:
    out = {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight,
        "decoder.final_layernorm.weight": model.model.norm.weight,
        "output_layer.weight": model.lm_head.weight,
    }
    for index, block in enumerate(model.model.layers):
        at, a = f"decoder.layers.{index}.", block.self_attn
        projections = (a.q_proj, a.k_proj, a.v_proj)
        if a.q_proj.bias is not None:
            out[at + "self_attention.linear_qkv.bias"] = qkv([each.bias for each in projections], a.head_dim)
        out |= {
            at + "self_attention.linear_qkv.layer_norm_weight": block.input_layernorm.weight,
            at + "self_attention.linear_qkv.weight": qkv([each.weight for each in projections], a.head_dim),
            at + "self_attention.linear_proj.weight": a.o_proj.weight,
            at + "mlp.linear_fc1.layer_norm_weight": block.post_attention_layernorm.weight,
            at + "mlp.linear_fc1.weight": torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]),
            at + "mlp.linear_fc2.weight": block.mlp.down_proj.weight,
        }
    return {name: tensor.detach() for name, tensor in out.items()}


LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


LLAMA3_ARGS = {"use_rope_scaling": True, "rotary_base": 500000}


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt2-gelu_new": (lambda: gpt2("gelu_new"), GPT2),
    "gpt2-gelu": (lambda: gpt2("gelu"), {**GPT2, "bias_gelu_fusion": False}),
    "gpt2-scaled": (lambda: gpt2("gelu_new"), {**GPT2, "apply_query_key_layer_scaling": True}),
    "llama-gqa": (lambda: llama(), LLAMA),
    "llama-tied": (
        lambda: llama(tie_word_embeddings=True),
        {**LLAMA, "untie_embeddings_and_output_weights": False},
    ),
    "llama-mha": (
        lambda: llama(num_key_value_heads=HEADS),
        {**LLAMA, "group_query_attention": False, "num_query_groups": 1},
    ),
    "llama-mqa": (lambda: llama(num_key_value_heads=1), {**LLAMA, "num_query_groups": 1}),
    "llama-head_dim": (lambda: llama(head_dim=16), {**LLAMA, "kv_channels": 16}),
    "llama-theta": (lambda: llama({"rope_theta": 500000.0}), {**LLAMA, "rotary_base": 500000}),
    "llama3-8": (lambda: llama({**LLAMA3, "factor": 8.0}), {**LLAMA, **LLAMA3_ARGS, "rope_scaling_factor": 8.0}),
    "llama3-32": (lambda: llama({**LLAMA3, "factor": 32.0}), {**LLAMA, **LLAMA3_ARGS, "rope_scaling_factor": 32.0}),
    "llama-linear": (
        lambda: llama({"rope_type": "linear", "factor": 4.0}),
        {**LLAMA, "rotary_seq_len_interpolation_factor": 4},
    ),
    "llama-attention_bias": (lambda: llama(attention_bias=True), {**LLAMA, "add_qkv_bias": True}),
    "llama-old-spelling": (
        lambda: llama(),
        {
            **{name: value for name, value in LLAMA.items() if name not in ("layernorm_epsilon", "padded_vocab_size")},
            "position_embedding_type": "learned_absolute",
            "use_rotary_position_embeddings": True,
            "norm_epsilon": 1e-6,
            "vocab_size": VOCAB,
        },
    ),
}


def weights_of(model: Any) -> Weights:
    return gpt2_weights(model) if hasattr(model, "transformer") else llama_weights(model)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, alone: None) -> None:
    make, args = MODELS[name]
    theirs = make()
    ours = build_model(args)
    load_weights(ours, weights_of(theirs).items())
    with torch.no_grad():
        expected = theirs(tokens()).logits
    got = logits(ours, tokens())
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_what_one_argument_changes_is_far_above_the_tolerance(alone: None) -> None:
    theirs = gpt2("gelu_new")
    with torch.no_grad():
        expected = theirs(tokens()).logits
    for wrong in ({"bias_gelu_fusion": False}, {"layernorm_epsilon": 1e-6}):
        ours = build_model({**GPT2, **wrong})
        load_weights(ours, gpt2_weights(theirs).items())
        assert (logits(ours, tokens()) - expected).abs().max() > 5 * TOLERANCE


def test_zero_centred_norms_hold_the_weight_minus_one(alone: None) -> None:
    theirs = llama()
    weights = llama_weights(theirs)
    shifted = {name: each - 1 if "norm" in name else each for name, each in weights.items()}
    for switch in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        ours = build_model({**LLAMA, "layernorm_zero_centered_gamma": False, switch: True})
        load_weights(ours, shifted.items())
        with torch.no_grad():
            expected = theirs(tokens()).logits
        torch.testing.assert_close(logits(ours, tokens()), expected, rtol=0, atol=TOLERANCE)


def test_bfloat16_is_near_float32(alone: None) -> None:
    theirs = llama()
    ours = build_model(LLAMA, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    load_weights(ours, llama_weights(theirs).items())
    with torch.no_grad():
        expected = theirs(tokens()).logits
    got = logits(ours, tokens())
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_mixture_of_experts_takes_the_norm_from_either_place(alone: None) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    theirs = randomised(
        MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCAB,
                hidden_size=HIDDEN,
                intermediate_size=FFN,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=2,
                num_local_experts=4,
                num_experts_per_tok=2,
                max_position_embeddings=LENGTH,
                rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                experts_implementation="eager",
            )
        )
    )
    with torch.no_grad():
        expected = theirs(tokens()).logits
    weights: Weights = {}
    for name, tensor in theirs.state_dict().items():
        weights |= _mixtral_weight(name, tensor)
    for index, block in enumerate(theirs.model.layers):
        a = block.self_attn
        weights[f"decoder.layers.{index}.self_attention.linear_qkv.weight"] = qkv(
            [each.weight.detach() for each in (a.q_proj, a.k_proj, a.v_proj)], HIDDEN // HEADS
        )
    args = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True, "moe_layer_freq": 1}
    for place in ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"):
        ours = build_model(args)
        load_weights(ours, ((name.replace("pre_mlp_layernorm.", place), each) for name, each in weights.items()))
        torch.testing.assert_close(logits(ours, tokens()), expected, rtol=0, atol=TOLERANCE)


def _mixtral_weight(name: str, tensor: Tensor) -> Weights:
    fixed = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    if name in fixed:
        return {fixed[name]: tensor}
    _, _, index, rest = name.split(".", 3)
    at = f"decoder.layers.{index}."
    experts = at + "mlp.experts.experts."
    if rest == "mlp.experts.gate_up_proj":
        return {f"{experts}{expert}.linear_fc1.weight": each for expert, each in enumerate(tensor)}
    if rest == "mlp.experts.down_proj":
        return {f"{experts}{expert}.linear_fc2.weight": each for expert, each in enumerate(tensor)}
    one = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "mlp.gate.weight": "mlp.router.weight",
    }
    return {at + one[rest]: tensor} if rest in one else {}
