"""The configuration files of other programs, as their own writers make them of Megatron Core's configuration.

What stands in them is from Megatron-Bridge 0.3.1 (`utils/yaml_utils.py`, `training/utils/config_utils.py`), verl 0.7
(`utils/checkpoint/megatron_checkpoint_manager.py`) and NeMo 2.4 (`lightning/io/mixin.py`): every field of the class,
with functions, dtypes and enums by their names.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
# What Megatron-Bridge's and NeMo's classes have beside Megatron Core's fields, with their defaults.
OF_GPT: dict[str, Any] = {
    "fp16_lm_cross_entropy": False,
    "parallel_output": True,
    "share_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 128,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "seq_len_interpolation_factor": None,
    "seq_length": 1024,
    "vocab_size": None,
}
OF_BRIDGE: dict[str, Any] = {**OF_GPT, "rope_scaling": False, "rope_scaling_factor": 1.0, "should_pad_vocab": False}
SPEC = "megatron.bridge.models.gpt_provider.default_layer_spec"
FUNCTIONS = {functional.silu: "torch.nn.functional.silu", functional.gelu: "torch._C._nn.gelu"}

LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 176,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "cuda_graph_scope": [],  # or Megatron Core warns of its own default
}
LLAMA_GPT: dict[str, Any] = {
    "share_embeddings_and_output_weights": False,
    "position_embedding_type": "rope",
    "seq_length": 64,
}


def fields_of(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that do not begin with an underscore."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if not f.name.startswith("_")}


def encoded(value: Any) -> Any:
    """Return a value as Megatron-Bridge's and NeMo's YAML says it."""
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, enum.Enum):
        kind = type(value)
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", "_call_": True, "_args_": [value.value]}
    if isinstance(value, functools.partial):
        name = f"{value.func.__module__}.{value.func.__qualname__}"
        return {"_target_": name, "_partial_": True, "_args_": list(value.args), **value.keywords}
    if callable(value):
        return {"_target_": FUNCTIONS[value], "_call_": False}
    if isinstance(value, dict):
        return {key: encoded(each) for key, each in value.items()}
    return [encoded(each) for each in value] if isinstance(value, list | tuple) else value


def run_config(core: dict[str, Any], gpt: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the content of Megatron-Bridge's `run_config.yaml` for a `TransformerConfig` and a provider of these
    values.
    """
    model = {**fields_of(TransformerConfig(**core)), **OF_BRIDGE, **gpt}
    optimizer = fields_of(OptimizerConfig(lr=3e-3, bf16=True, use_distributed_optimizer=True))
    return {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": {
            "_target_": PROVIDER,
            **encoded(model),
            "transformer_layer_spec": {"_target_": SPEC, "_call_": False},
        },
        "optimizer": {"_target_": "megatron.bridge.training.config.OptimizerConfig", **encoded(optimizer)},
        "checkpoint": {
            "_target_": "megatron.bridge.training.config.CheckpointConfig",
            "save_optim": True,
            "save_rng": True,
            "fully_parallel_save": True,
            "dist_ckpt_optim_fully_reshardable": False,
        },
        "tokenizer": {"_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig", "vocab_size": None},
        "ddp": {
            "_target_": "megatron.bridge.training.config.DistributedDataParallelConfig",
            "grad_reduce_in_fp32": True,
            "bucket_size": None,
            "overlap_grad_reduce": False,
        },
        "peft": None,
        **sections,
    }


def transformer_config(core: dict[str, Any]) -> str:
    """Return the content of verl's `transformer_config.json`: without functions,
    dtypes and the attention's enum as texts.
    """
    content = {}
    for name, value in fields_of(TransformerConfig(**core)).items():
        if not callable(value) or isinstance(value, torch.dtype):
            content[name] = str(value) if isinstance(value, torch.dtype | enum.Enum) else value
    return json.dumps(content, indent=2)


def model_yaml(core: dict[str, Any], gpt: dict[str, Any]) -> str:
    """Return the content of NeMo's `context/model.yaml`, whose dtypes are the class alone."""
    values = encoded({**fields_of(TransformerConfig(**core)), **OF_GPT, **gpt})
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        values[name] = {"_target_": "torch.dtype", "_call_": True}
    config = {"_target_": "nemo.collections.llm.gpt.model.llama.Llama2Config7B", **values}
    config |= {"forward_step_fn": {"_target_": "nemo.collections.llm.gpt.model.base.gpt_forward_step", "_call_": False}}
    model = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": config, "optim": None}
    return yaml.safe_dump(model)


def without_arguments(source: Path, target: Path) -> None:
    """Copy the directory of an iteration without the arguments in its common state."""
    shutil.copytree(source, target)
    state = torch.load(target / "common.pt", weights_only=False)
    del state["args"]
    torch.save(state, target / "common.pt")


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Write a YAML file as all of them do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
