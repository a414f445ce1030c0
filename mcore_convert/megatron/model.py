"""A Megatron Core `GPTModel` from the Megatron-LM arguments that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mcore_convert.errors import ConfigError
from mcore_convert.megatron.config import config_of
from mcore_convert.megatron.cpu import import_megatron, without_cuda
from mcore_convert.spec import hybrid
from mcore_convert.spec.layers import ATTENTION, EXPERTS, LINEAR, MLP, Parts, parts_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class Choices:
    """Choices of how a model is computed that its arguments do not make.

    `settings`: fields of `TransformerConfig`. `block_spec`: makes the layers of a (virtual) stage; those of
    `local_block_spec` unless given. `model_class`: a class derived from `GPTModel`.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    block_spec: Callable[[TransformerConfig, int | None], TransformerBlockSubmodules] | None = None
    model_class: type[GPTModel] | None = None


def build_model(
    args: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    choices: Choices | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> GPTModel:
    """Build a model, or one (virtual) pipeline stage of it, in the current model-parallel groups.

    Parameters are left unset, unless `choices` initialises them: fill them with `load_weights` or
    `load_torch_dist`. Layers come from Megatron's local spec, which needs no Transformer Engine. Logits stay split over
    the tensor-parallel ranks, as in training.

    Raises:
        ConfigError: an argument is missing, or requests a feature that is not supported here.
    """
    import_megatron()
    from megatron.core.models.gpt import GPTModel

    choices = choices or Choices()
    config = config_of(args, dtype=dtype, settings=choices.settings)
    positions = _position_embedding_of(args)
    if hybrid.is_hybrid(args):
        return (
            _build_hybrid(args, config, positions, pre_process=pre_process, post_process=post_process).to(dtype).eval()
        )
    layers = (choices.block_spec or local_block_spec)(config, vp_stage)
    with without_cuda():
        model = (choices.model_class or GPTModel)(
            config,
            layers,
            vocab_size=_required(args, "padded_vocab_size", "vocab_size"),
            max_sequence_length=_required(args, "max_position_embeddings", "seq_length"),
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=positions,
            rotary_base=args.get("rotary_base") or 10000,
            rotary_percent=args.get("rotary_percent") or 1.0,
            rope_scaling=bool(args.get("use_rope_scaling")),
            rope_scaling_factor=args.get("rope_scaling_factor") or 8.0,
            seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
            vp_stage=vp_stage,
            **({"mtp_block_spec": predicting_spec(config, layers, vp_stage)} if config.mtp_num_layers else {}),
        )
    # norms and position embeddings do not follow params_dtype; rotary frequencies are not a buffer and stay float32
    return model.to(dtype).eval()


def _build_hybrid(args: Mapping[str, Any], config: TransformerConfig, positions: str, **stage: bool) -> Any:
    """Return a `MambaModel` in place of a `GPTModel`; 0.16.1 has neither virtual stages of it nor stage borders."""
    from mcore_convert.megatron.mixers import hybrid_stack, import_hybrids

    import_hybrids()
    from megatron.core.models.mamba import MambaModel

    _bind_what_is_not_installed(config)
    dense = _local_layer(config, frozenset({ATTENTION, MLP}))
    sparse = _local_layer(config, frozenset({ATTENTION, EXPERTS})) if config.num_moe_experts else None
    with without_cuda():
        return MambaModel(
            config,
            hybrid_stack(config, dense, sparse),
            vocab_size=_required(args, "padded_vocab_size", "vocab_size"),
            max_sequence_length=_required(args, "max_position_embeddings", "seq_length"),
            hybrid_override_pattern=hybrid.letters_of(args, config.num_layers),
            share_embeddings_and_output_weights=not args.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=positions,
            rotary_base=args.get("rotary_base") or 10000,
            rotary_percent=args.get("rotary_percent") or 1.0,
            **stage,
        )


def build_stages(
    args: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, choices: Choices | None = None
) -> list[GPTModel]:
    """Build the part of the model on this rank in the current groups: one stage, or one per virtual pipeline stage."""
    import_megatron()
    from megatron.core import parallel_state

    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return [
        build_model(
            args,
            dtype=dtype,
            choices=choices,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        for stage in (range(vpp) if vpp else [None])
    ]


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's local layer spec, with torch's norms in place of those of Apex or Transformer Engine."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from mcore_convert.megatron.norm import Norm

    _bind_what_is_not_installed(config)
    parts = parts_of_config(config)
    specs = {each: _local_layer(config, each) for each in set(parts)}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[specs[parts[layer]] for layer in mine], layer_norm=Norm)


def _bind_what_is_not_installed(config: TransformerConfig) -> None:
    """Bind names of Transformer Engine that Megatron Core uses without a check whether it is installed."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if config.num_moe_experts and not hasattr(moe_utils, "te_general_gemm"):
        # the router tests whether it is None, but without Transformer Engine the name is never bound (0.16.1)
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        # it takes Transformer Engine as installed if the module that wraps it can be imported (0.16.1)
        multi_latent_attention.HAVE_TE = False


def predicting_spec(config: TransformerConfig, layers: TransformerBlockSubmodules, vp_stage: int | None) -> Any:
    """Return the stage's layers that predict further tokens, each like the decoder's last; None if it has none."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from mcore_convert.megatron.norm import Norm

    if not layers.layer_specs:  # a separate stage: use the spec of the decoder's last layer
        layers = replace(layers, layer_specs=[_local_layer(config, parts_of_config(config)[-1])])
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs if block is not None else ():
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = Norm
    return block


def parts_of_config(config: TransformerConfig) -> Parts:
    """Return the parts of each layer."""
    return parts_of({**vars(config), "num_experts": config.num_moe_experts}, config.num_layers)


def _local_layer(config: TransformerConfig, parts: frozenset[str]) -> ModuleSpec:
    """Return a layer with these parts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    from mcore_convert.megatron.norm import Norm

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if EXPERTS in parts else None,
        moe_grouped_gemm=False,  # experts one by one: same keys in a checkpoint, and no CUDA kernel
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if LINEAR in parts:
        layer.submodules.self_attention = gated_delta_net()
        layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
        return layer
    attention = layer.submodules.self_attention.submodules
    norm = Norm if config.qk_layernorm else IdentityOp
    if config.multi_latent_attention:
        from mcore_convert.megatron.attention import LatentDotProductAttention

        attention.q_layernorm = attention.kv_layernorm = norm
        attention.core_attention = LatentDotProductAttention
    else:
        attention.q_layernorm = attention.k_layernorm = norm
    return layer


def gated_delta_net() -> ModuleSpec:
    """Return Megatron Core's linear attention with its own linear layers; its spec is for Transformer Engine only."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec

    from mcore_convert.megatron.norm import Norm

    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear),
    )


def _position_embedding_of(args: Mapping[str, Any]) -> str:
    name: str = args.get("position_embedding_type") or "learned_absolute"
    if args.get("use_rotary_position_embeddings"):  # the switch of older versions, stored beside the old default
        name = "rope"
    if name == "learned_absolute" and args.get("add_position_embedding") is False:
        name = "none"
    if name not in ("learned_absolute", "rope", "yarn", "none"):
        raise ConfigError(f"a model with `position_embedding_type` = {name!r} cannot be built here")
    return name


def _required(args: Mapping[str, Any], *names: str) -> int:
    """Return the first of these arguments that is set."""
    for name in names:
        if args.get(name) is not None:
            return int(args[name])
    raise ConfigError("the Megatron arguments do not describe a model", items=[" or ".join(names)])
