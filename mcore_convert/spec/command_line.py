"""The Megatron-LM command line of a model: the flags of its architecture, also those that no checkpoint carries."""

from __future__ import annotations

from typing import Any

from mcore_convert.spec.arguments import Values, normalise

# Flags with a value, in the order in which a reader looks for them. `--norm-epsilon`, `--rotary-base` and the rope
# scaling are among them: `--use-checkpoint-args` takes over neither the first nor the last in any version.
SIZES = {
    "--num-layers": "num_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--kv-channels": "kv_channels",
    "--seq-length": "max_position_embeddings",
    "--max-position-embeddings": "max_position_embeddings",
    "--position-embedding-type": "position_embedding_type",
    "--normalization": "normalization",
    "--norm-epsilon": "layernorm_epsilon",
    "--attention-dropout": "attention_dropout",
    "--hidden-dropout": "hidden_dropout",
    "--make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
}

# pretrain_gpt.py and gpt_builders.py give GPTModel `rope_scaling` alone, so that its own default holds.
SCRIPTS_ROPE_SCALING_FACTOR = 8.0

# Flags without one, and the value of the argument that asks for them.
SWITCHES = {
    "--swiglu": ("swiglu", True),
    "--squared-relu": ("squared_relu", True),
    "--quick-geglu": ("quick_geglu", True),
    "--openai-gelu": ("openai_gelu", True),
    "--qk-layernorm": ("qk_layernorm", True),
    "--rotary-interleaved": ("rotary_interleaved", True),
    "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
    "--disable-bias-linear": ("add_bias_linear", False),
    "--untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
    "--bf16": ("bf16", True),
    "--fp16": ("fp16", True),
}


def command_line(args: Values) -> list[str]:
    """The flags of the architecture, layout, dtype and tokenizer, as Megatron-LM 0.12 to main parse them.

    Two flags are younger, and stand there only where the model needs them (`caveats`). Give all of them beside
    `--use-checkpoint-args`, or instead of it.
    """
    args = normalise(args)
    flags = [text for flag, name in SIZES.items() if args.get(name) is not None for text in (flag, _text(args[name]))]
    if args["num_query_groups"] != args["num_attention_heads"]:
        flags += ["--group-query-attention", "--num-query-groups", _text(args["num_query_groups"])]
    flags += [flag for flag, (name, value) in SWITCHES.items() if args.get(name) is value]
    if args.get("add_qkv_bias") and not args["add_bias_linear"]:  # biases everywhere include these
        flags += ["--add-qkv-bias"]
    if not args["swiglu"] and not args["bias_gelu_fusion"]:  # the fused gelu is the tanh form
        flags += ["--no-bias-gelu-fusion"]
    if args.get("window_size") is not None:  # without brackets, which a shell would want quoted
        flags += ["--window-size", ",".join(map(str, args["window_size"]))]
    if args["position_embedding_type"] == "rope":
        flags += ["--rotary-base", _text(args["rotary_base"])]
        if args["rotary_percent"] != 1.0:
            flags += ["--rotary-percent", _text(args["rotary_percent"])]
        if args.get("rotary_seq_len_interpolation_factor") is not None:
            flags += ["--rotary-seq-len-interpolation-factor", _text(args["rotary_seq_len_interpolation_factor"])]
        if args["use_rope_scaling"]:
            flags += ["--use-rope-scaling", "--rope-scaling-factor", _text(args["rope_scaling_factor"])]
        if args.get("no_rope_freq"):
            flags += ["--no-rope-freq", _text(args["no_rope_freq"]).replace(" ", "")]
        if args["rotary_interleaved"]:  # Megatron-LM refuses it beside its fused kernel, which is on by default
            flags += ["--no-rope-fusion"]
    return flags + _tokenizer(args)


def caveats(args: Values) -> list[str]:
    """What the training scripts of Megatron-LM do not do with these arguments, a line each; mostly none."""
    args = normalise(args)
    lines = []
    factor, linear = args["rope_scaling_factor"], args.get("rotary_seq_len_interpolation_factor")
    if args["use_rope_scaling"] and factor != SCRIPTS_ROPE_SCALING_FACTOR:
        lines.append(
            f"`rope_scaling_factor` = {factor}: `GPTModel` takes it, but `pretrain_gpt.py` of Megatron-LM 0.12 to main "
            f"does not hand it on, and scales by {SCRIPTS_ROPE_SCALING_FACTOR}"
        )
    for name, since in {"no_rope_freq": "0.13", "window_size": "0.15"}.items():
        if args.get(name):
            flag = name.replace("_", "-")
            lines.append(f"`{name}` = {args[name]}: Megatron-LM has `--{flag}` since {since}")
    if args["position_embedding_type"] == "rope" and linear not in (None, 1):
        lines.append(
            f"`rotary_seq_len_interpolation_factor` = {linear}: `GPTModel` takes it, but `pretrain_gpt.py` of "
            "Megatron-LM does not hand it on before 0.19"
        )
    return lines


def _tokenizer(args: Values) -> list[str]:
    if args.get("tokenizer_model"):
        return ["--tokenizer-type", args["tokenizer_type"], "--tokenizer-model", args["tokenizer_model"]]
    vocab = args.get("vocab_size")
    if vocab is None:
        return []
    # Up to 0.17 NullTokenizer adds one to the size, since 0.18 it does not. Both pad to the same number of rows, and
    # none is lost, unless the vocabulary needs no padding: one more would then open a new block of rows.
    multiple = args.get("make_vocab_size_divisible_by", 128) * args.get("tensor_model_parallel_size", 1)
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab if vocab % multiple else vocab - 1)]


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
