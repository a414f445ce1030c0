"""Configurations that other programs store beside a Megatron checkpoint instead of arguments.

Megatron-Bridge, NeMo-RL    run_config.yaml           0.2 to 0.6, `training/checkpointing.py`, `training/config.py`
verl                        transformer_config.json   0.4 to 0.9, `utils/checkpoint/megatron_checkpoint_manager.py`
NeMo 2                      context/model.yaml        2.0 to 2.4, `lightning/io/mixin.py`, `collections/llm/gpt/model`
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid
from mcore_convert.spec.config.completion import PLAIN
from mcore_convert.spec.config.provider import arguments_of, names_activation
from mcore_convert.spec.config.symbols import TARGET, name_of, plain_fields, refuse_unknown

Values = Mapping[str, Any]

BRIDGE, VERL, NEMO = "Megatron-Bridge", "verl", "NeMo 2"

# Classes of GPT models as Megatron Core builds them, by module: their fields describe the model completely. Others
# (Gemma's, vision, hybrids) compute more than their fields describe.
PROVIDERS = re.compile(
    r"""
    megatron\.bridge\.models\.
      ( gpt_provider\.GPT(Model)?Provider\w*
      | mla_provider\.MLAModelProvider
      | gpt\.(gpt_builder|model_config)\.(Bridge)?GPTModelConfig
      | (mistral\.mistral|nemotron\.nemotron|deepseek\.deepseek|glm\.glm45|kimi\.kimi|gpt_oss\.gpt_oss)_provider\.\w+
      | llama_nemotron\.llama_nemotron_provider\.Llama31Nemotron(Nano8B|70B)Provider
      | llama\.\w+\.\w+ | qwen\.\w+\.\w+
      )
    | megatron\.training\.models\.gpt(\.\w+)?\.GPTModelConfig
    """,
    re.VERBOSE,
)
# The same for hybrids, whose layers are described by a pattern; its name differs between versions.
HYBRID_PROVIDERS = re.compile(
    r"""
    megatron\.bridge\.models\.
      ( mamba\.mamba_provider\.MambaModelProvider | hybrid\.hybrid_provider\.HybridModelProvider
      | (mamba|hybrid)\.(mamba|hybrid)_builder\.(Bridge)?(Mamba|Hybrid)ModelConfig
      | (mamba|nemotronh)\.nemotron_h_provider\.\w+
      )
    | megatron\.training\.models\.hybrid\.HybridModelConfig
    """,
    re.VERBOSE,
)
NEMO_CONFIGS = re.compile(
    r"nemo\.collections\.llm\.gpt\.model\."
    r"(base|llama|qwen2|qwen3|mistral|mixtral|nemotron|starcoder|starcoder2|baichuan|chatglm|phi3mini|deepseek)\.\w+Config\w*"
)

# Sections whose fields have the names of arguments, with the fields that are renamed or (empty) dropped.
SECTIONS: dict[str, dict[str, str]] = {
    "optimizer": {},
    "scheduler": {},
    "train": {},
    "rng": {},
    "checkpoint": {"save_optim": "", "save_rng": "", "load": "", "save": "", "fully_parallel_save": ""},
    "ddp": {
        "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
        "bucket_size": "ddp_bucket_size",
        "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
        "average_in_collective": "ddp_average_in_collective",
    },
    "tokenizer": {"vocab_size": ""},
}
# Arguments that must agree in two configurations of one model.
SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_shared_expert_intermediate_size",
)
# Arguments that belong to the run and not to the model.
OF_RUN = ("fp16", "bf16", "params_dtype", "attention_dropout", "hidden_dropout", "moe_grouped_gemm", "transformer_impl")
# Values of a plain run of Megatron-LM for arguments that no configuration sets.
UNSAID: dict[str, Any] = {**PLAIN, "no_save_optim": None, "no_save_rng": None}
# Arguments that NeMo's strategy sets after the configuration was written.
OF_STRATEGY = re.compile(r"\w*(parallel_size|parallel_layout|pipeline_num_layers|pipeline_split)|sequence_parallel")


@dataclass(frozen=True)
class Recorded:
    """The configuration of another program.

    `args` are those of Megatron-LM. They are not `complete` if the program omits functions, and with them the
    activation, as verl does, and Megatron-Bridge 0.4 to 0.6 in models with a section `transformer`
    (`models/common/base.py`, `as_dict`): then `config.json` is required as well. `tree` is a `run_config.yaml`, to be
    written again.
    """

    program: str
    file: str
    args: Values
    complete: bool = True
    tree: Values | None = field(default=None)


def of_bridge(tree: Values, file: str) -> Recorded:
    """Convert a `run_config.yaml`.

    Raises:
        ConfigError: it names unknown classes or functions, or describes a model other than GPT.
    """
    where = f"`{file}`"
    refuse_unknown(tree, where)
    model = tree.get("model")
    if not isinstance(model, Mapping):
        raise ConfigError(f"{where} has no section `model`", hint="was it written by Megatron-Bridge?")
    is_hybrid = HYBRID_PROVIDERS.fullmatch(name_of(model) or "") is not None
    _refuse_class(name_of(model), HYBRID_PROVIDERS if is_hybrid else PROVIDERS, where)
    if tree.get("peft") is not None:
        raise ConfigError(f"{where} has a section `peft`: such a checkpoint holds an adapter's weights and no model's")
    nested = model.get("transformer")
    flat = {**nested, **model} if isinstance(nested, Mapping) else dict(model)
    flat.pop("transformer", None)
    if is_hybrid:
        flat |= hybrid.recorded(flat)
    args = dict(UNSAID)
    for section, renamed in SECTIONS.items():
        fields = plain_fields(tree.get(section)).items()
        args |= {argument: value for name, value in fields if (argument := renamed.get(name, name))}
    # a nested class ties embeddings only if it says so (`GPTModelConfig`)
    args |= arguments_of(flat, where, tied=not isinstance(nested, Mapping))
    return Recorded(BRIDGE, file, _with_whole_vocabulary(args), names_activation(flat), tree)


def of_nemo(tree: Values, file: str) -> Recorded:
    """Convert a `context/model.yaml`. It lacks the layout, which NeMo's strategy has.

    Raises:
        ConfigError: it names unknown classes or functions, or describes a model other than GPT.
    """
    where = f"`{file}`"
    refuse_unknown(tree, where)
    config = tree.get("config")
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} has no `config`", hint="was it written by NeMo 2?")
    _refuse_class(name_of(config), NEMO_CONFIGS, where)
    optimizer = tree.get("optim")
    settings = plain_fields(optimizer.get("config") if isinstance(optimizer, Mapping) else None)
    args = {**UNSAID, **settings, **arguments_of(config, where)}
    args = {name: value for name, value in args.items() if not OF_STRATEGY.fullmatch(name)}
    return Recorded(NEMO, file, _with_whole_vocabulary(args), names_activation(config))


def of_verl(tree: Values, file: str) -> Recorded:
    """Convert a `transformer_config.json`. It omits functions, so that `config.json` has to name the activation.

    Raises:
        ConfigError: it has no sizes.
    """
    args = arguments_of(tree, f"`{file}`")
    for name in ("untie_embeddings_and_output_weights", "attention_backend"):
        args.pop(name, None)
    if "bias_activation_fusion" in args and not tree.get("gated_linear_unit"):
        args["bias_gelu_fusion"] = bool(args["bias_activation_fusion"])
    return Recorded(VERL, file, args, complete=False)


def agreed(args: Values, recorded: Recorded) -> dict[str, Any]:
    """Return the arguments of a `config.json` merged with those of the run, after checking that they agree.

    Raises:
        ConfigError: they describe different models; with every argument that differs.
    """
    stated = {name: value for name, value in recorded.args.items() if value is not None}
    differing = [
        f"`{name}` = {stated[name]!r}, and {args[name]!r} in config.json"
        for name in SIZES
        if name in stated and args.get(name) is not None and not _are_equal(stated[name], args[name])
    ]
    if differing:
        raise ConfigError(
            f"`{recorded.file}` and the Hugging Face configuration describe different models", items=differing
        )
    return {**recorded.args, **args, **{name: stated[name] for name in OF_RUN if name in stated}}


def _are_equal(stated: Any, other: Any) -> bool:
    numbers = isinstance(stated, int | float) and isinstance(other, int | float)
    return math.isclose(stated, other) if numbers else bool(stated == other)


def _refuse_class(name: str | None, known: re.Pattern[str], where: str) -> None:
    if name is None or not known.fullmatch(name):
        raise ConfigError(
            f"{where} describes a model that is not known as one of Megatron Core's GPT models or hybrids",
            items=[f"{TARGET}: {name}"],
            hint="--hf-config PATH says the architecture where such a class adds nothing to it: move the file aside",
        )


def _with_whole_vocabulary(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with `vocab_size` as the whole vocabulary for any tokenizer.

    Megatron-LM up to 0.17 excludes the end-of-text token that `NullTokenizer` adds (`arguments.true_vocab_size`).
    """
    if args.get("tokenizer_type") == "NullTokenizer" and isinstance(args.get("vocab_size"), int):
        args["null_tokenizer_eod_id"] = args["vocab_size"] - 1
    return args
