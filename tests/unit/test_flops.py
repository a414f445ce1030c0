"""FLOPs of a step and peaks of devices: Megatron-LM's count, the paper's, and what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from train_entry.report.flops import flops_per_token, mfu
from train_entry.report.peak import peak_tflops

GPT2 = {
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
    "padded_vocab_size": 50304,
    "seq_length": 1024,
}


LLAMA_1B = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "swiglu": True,
    "padded_vocab_size": 128256,
    "seq_length": 4096,
}


WIDE_HEADS = LLAMA_1B | {
    "num_layers": 28,
    "hidden_size": 1024,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 16,
    "kv_channels": 128,
    "padded_vocab_size": 151936,
    "seq_length": 2048,
}


LLAMA_7B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "swiglu": True,
    "padded_vocab_size": 32000,
    "seq_length": 4096,
}


MIXTRAL = LLAMA_7B | {
    "ffn_hidden_size": 14336,
    "group_query_attention": True,
    "num_query_groups": 8,
    "num_experts": 8,
    "moe_router_topk": 2,
}


SHARED_EXPERT = {
    "num_layers": 24,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "num_attention_heads": 16,
    "swiglu": True,
    "num_experts": 60,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 5632,
    "moe_router_topk": 4,
    "padded_vocab_size": 151936,
    "seq_length": 2048,
}


EVERY_OTHER = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_layer_freq": 2,
    "padded_vocab_size": 256,
    "seq_length": 32,
}


# What `num_floating_point_operations` of Megatron-LM at core_v0.16.1 returns for three samples of these.
@pytest.mark.parametrize(
    ("args", "three_samples"),
    [
        (GPT2, 2_451_553_910_784),
        (LLAMA_1B, 101_004_745_900_032),
        (LLAMA_7B, 526_709_019_377_664),
        (WIDE_HEADS, 26_299_695_366_144),
        (MIXTRAL, 979_432_932_114_432),
        (SHARED_EXPERT, 91_254_096_396_288),
        (EVERY_OTHER, 127_401_984),
        (EVERY_OTHER | {"moe_layer_freq": [1, 0, 1, 0]}, 127_401_984),
    ],
)
def test_the_count_is_megatrons(args: dict[str, Any], three_samples: int) -> None:
    assert flops_per_token(args) * 3 * args["seq_length"] == three_samples


def test_the_count_is_that_of_the_paper() -> None:
    """Equation 3 of https://arxiv.org/abs/2104.04473 without recomputation (72, not 96) and with half the attention."""
    layers, h, s, v = 12, 768, 1024, 50304
    assert flops_per_token(GPT2) == pytest.approx(72 * layers * h**2 * (1 + s / (12 * h) + v / (12 * layers * h)))
    assert flops_per_token(GPT2, 2048) - flops_per_token(GPT2) == 6 * layers * h * 1024


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.oracle
def test_the_count_is_what_torch_counts(family: str) -> None:
    """But for the half of the attention that is masked, which torch counts, and tables of rotary angles."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    samples, length = 2, 32
    args = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 320}
    model: Any
    if family == "gpt2":
        gpt2 = transformers.GPT2Config(
            n_layer=3, n_embd=64, n_head=4, vocab_size=320, n_positions=length, attn_implementation="eager"
        )
        model = transformers.GPT2LMHeadModel(gpt2)
    else:
        args |= {"ffn_hidden_size": 96, "num_query_groups": 2, "group_query_attention": True, "swiglu": True}
        llama = transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=320,
            max_position_embeddings=length,
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(llama)
    tokens = torch.randint(320, (samples, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    counted = counter.get_total_flops()
    rotary = counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {})
    masked = 6 * 3 * 64 * length  # of a token: layers, width of all heads, tokens
    assert counted - sum(rotary.values()) == samples * length * (flops_per_token(args, length) + masked)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("Quadro RTX 6000", "bf16", None),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla V100-PCIE-16GB", "fp32", 14.0),
        ("Tesla T4", "fp16", 65),
        ("Some other device", "bf16", None),
    ],
)
def test_peaks_are_found_by_the_name_of_a_device(device: str, precision: Any, expected: float | None) -> None:
    assert peak_tflops(device, precision) == expected


def test_tf32_is_the_peak_of_fp32_only_where_it_is_used() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "fp32") == 66.9
    assert peak_tflops("NVIDIA H100 80GB HBM3", "fp32", tf32=True) == 494.7
    assert peak_tflops("Tesla V100-SXM2-16GB", "fp32", tf32=True) == 15.7
    assert mfu(494.7, 989.4) == 0.5
    assert mfu(1.0, None) is None
