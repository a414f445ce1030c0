"""Sizes of a model, from its Megatron arguments, and the words that describe a weight's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec import hybrid
from mcore_convert.spec.layers import (
    ATTENTION,
    EXPERTS,
    LINEAR,
    MAMBA,
    MAX_LAYERS,
    MLP,
    Parts,
    are_stacked,
    check_number,
    parts_of,
)
from mcore_convert.spec.shard import Shape, Shard

MAX_EXPERTS = 2**18  # of all layers


@dataclass(frozen=True)
class Dims:
    """Sizes in elements, under Megatron's names. `vocab_size` is the true one, without padding.

    `parts` has the parts of each layer; by default all layers have experts, or none has. `stacked`: Megatron Core
    treats the layers as equal, so that one key of `torch_dist` holds a weight of all of them. The ranks and sizes of
    latent attention are None for other attention, `q_lora_rank` also if queries have no low-rank projection.
    `output_gate`: queries are stored with a gate. The sizes of linear attention are None if no layer has it. After the
    decoder, `mtp_num_layers` layers predict further tokens, each with the parts of the decoder's last layer. With
    `expert_bias`, experts and their router have biases, and Megatron Core does not shard an expert over ranks.
    `pattern` has one letter per layer of a hybrid; the sizes of Mamba mixers are None if no layer has one.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    tied: bool
    qkv_bias: bool
    linear_bias: bool
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    shared_ffn_hidden_size: int | None = None
    parts: Parts = ()
    stacked: bool = True
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    low_rank_queries: bool = False
    qk_norm: bool = False
    mtp_num_layers: int = 0
    output_gate: bool = False
    linear_conv_kernel_dim: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    expert_bias: bool = False
    pattern: str | None = None
    mamba_state_dim: int | None = None
    mamba_head_dim: int | None = None
    mamba_num_groups: int | None = None
    mamba_num_heads: int | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            part = EXPERTS if self.num_experts else MLP
            object.__setattr__(self, "parts", (frozenset({part, ATTENTION}),) * self.num_layers)

    @staticmethod
    def of(args: Mapping[str, Any], *, vocab_size: int, padded_vocab_size: int) -> Dims:
        """Return the sizes for normalised Megatron arguments (`arguments.normalise`).

        Raises:
            ConfigError: an argument is missing, or the heads cannot be grouped.
        """
        names = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "max_position_embeddings",
        )
        bad = [name for name in names if not isinstance(args.get(name), int) or args[name] < 1]
        if bad:
            raise ConfigError(
                "the Megatron arguments do not describe a model",
                items=[f"{name} = {args.get(name)!r}" for name in bad],
            )
        if vocab_size < 1:
            raise ConfigError(f"`vocab_size` = {vocab_size} is no vocabulary")
        check_number(args["num_layers"])
        if args["num_attention_heads"] % args["num_query_groups"]:
            raise ConfigError(
                f"`num_attention_heads` = {args['num_attention_heads']} cannot be shared by "
                f"`num_query_groups` = {args['num_query_groups']}"
            )
        with_experts = bool(args.get("num_experts"))
        experts = args.get("num_experts") or 0
        if not isinstance(experts, int) or not 0 <= experts * args["num_layers"] <= MAX_EXPERTS:
            raise ConfigError(f"`num_experts` = {experts!r} is not a number of experts")
        latent = _latent(args) if args.get("multi_latent_attention") else {}
        parts = parts_of(args, args["num_layers"])
        linear = _linear(args) if any(LINEAR in each for each in parts) else {}
        mamba = _mamba(args) if any(MAMBA in each for each in parts) else {}
        mtp = args.get("mtp_num_layers") or 0
        if not isinstance(mtp, int) or not 0 <= mtp <= MAX_LAYERS:
            raise ConfigError(f"`mtp_num_layers` = {mtp!r} is not a number of layers")
        return Dims(
            **{name: args[name] for name in names},
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            tied=not args.get("untie_embeddings_and_output_weights", False),
            qkv_bias=bool(args.get("add_qkv_bias") or args.get("add_bias_linear")),
            linear_bias=bool(args.get("add_bias_linear")),
            num_experts=args.get("num_experts"),
            moe_ffn_hidden_size=(args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]) if with_experts else None,
            shared_ffn_hidden_size=args.get("moe_shared_expert_intermediate_size") if with_experts else None,
            parts=parts,
            stacked=are_stacked(args),
            **latent,
            low_rank_queries=latent.get("q_lora_rank") is not None,
            qk_norm=bool(args.get("qk_layernorm")),
            mtp_num_layers=int(mtp),
            output_gate=bool(args.get("attention_output_gate")),
            **linear,
            expert_bias=has_expert_bias(args),
            pattern=hybrid.letters_of(args, args["num_layers"]),
            **mamba,
        )

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are computed from one latent vector."""
        return self.kv_lora_rank is not None

    @property
    def predicting(self) -> range:
        """Indices of the layers that predict further tokens."""
        return range(self.num_layers, self.num_layers + self.mtp_num_layers)

    def parts_of(self, layer: int) -> frozenset[str]:
        """Return the parts of a layer. A predicting layer has those of the last one (`get_gpt_mtp_block_spec`)."""
        return self.parts[min(layer, self.num_layers - 1)]

    def layers_with(self, part: str | None) -> list[int]:
        """Return the layers that have a part; all for None."""
        return [layer for layer, parts in enumerate(self.parts) if part is None or part in parts]

    def size(self, word: str) -> int:
        """Return the size for a word of a shape; `vocab` is the true vocabulary."""
        return self._sizes[word]

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        rope, v = self.qk_pos_emb_head_dim or 0, self.v_head_dim or 0
        gated = 2 if self.output_gate else 1
        key_heads, value_heads = self.linear_num_key_heads or 0, self.linear_num_value_heads or 0
        keys, values = key_heads * (self.linear_key_head_dim or 0), value_heads * (self.linear_value_head_dim or 0)
        mamba_heads = self.mamba_num_heads or 0
        mamba, states = (
            mamba_heads * (self.mamba_head_dim or 0),
            (self.mamba_num_groups or 0) * (self.mamba_state_dim or 0),
        )
        return {
            "vocab": self.vocab_size,
            "positions": self.max_position_embeddings,
            "hidden": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "heads": self.num_attention_heads * self.kv_channels,
            "qkv": (gated * self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels,
            "ffn": self.ffn_hidden_size,
            "gated_ffn": 2 * self.ffn_hidden_size,
            "head": self.kv_channels,
            "experts": self.num_experts or 0,
            "moe_ffn": self.moe_ffn_hidden_size or 0,
            "gated_moe_ffn": 2 * (self.moe_ffn_hidden_size or 0),
            "shared_ffn": self.shared_ffn_hidden_size or 0,
            "gated_shared_ffn": 2 * (self.shared_ffn_hidden_size or 0),
            "q_rank": self.q_lora_rank or 0,
            "kv_rank": self.kv_lora_rank or 0,
            "kv_down": (self.kv_lora_rank or 0) + rope,
            "q_latent": self.num_attention_heads * ((self.qk_head_dim or 0) + rope),
            "kv_latent": self.num_attention_heads * ((self.qk_head_dim or 0) + v),
            "v_latent": self.num_attention_heads * v,
            "linear_keys": keys,
            "linear_values": values,
            "linear_key_heads": key_heads,
            "linear_heads": value_heads,
            "linear_head": self.linear_value_head_dim or 0,
            "linear_in": 2 * keys + 2 * values + 2 * value_heads,
            "linear_conv": 2 * keys + values,
            "linear_kernel": self.linear_conv_kernel_dim or 0,
            "mamba_inner": mamba,
            "mamba_states": states,
            "mamba_heads": mamba_heads,
            "mamba_in": 2 * mamba + 2 * states + mamba_heads,
            "mamba_conv": mamba + 2 * states,
            "mamba_kernel": hybrid.KERNEL,
            "twice_hidden": 2 * self.hidden_size,
            "one": 1,
        }

    def sized(self, shard: Shard) -> Shard:
        """Return the shard with numbers in place of the words for the sizes of its parts."""
        if not shard.names:
            return shard
        if shard not in self._sized:
            parts = tuple(self.size(part) if isinstance(part, str) else part for part in shard.parts)
            self._sized[shard] = replace(shard, parts=parts)
        return self._sized[shard]

    @cached_property
    def _sized(self) -> dict[Shard, Shard]:
        return {}

    def padded_shape(self, words: tuple[str, ...], *, vocab: bool) -> Shape:
        """Return the shape in Megatron: a `vocab` row has padding."""
        shape = self.shape(words)
        return (self.padded_vocab_size, *shape[1:]) if vocab else shape

    def shape(self, words: tuple[str, ...]) -> Shape:
        """Return the shape for the words of a row."""
        shape = self._shapes.get(words)
        if shape is None:
            shape = self._shapes[words] = tuple(self.size(word) for word in words)
        return shape

    @cached_property
    def _shapes(self) -> dict[tuple[str, ...], Shape]:
        return {}  # a cache: shapes are requested for every expert of every layer

    @cached_property
    def packed(self) -> dict[tuple[Any, Shape], Any]:
        """Cache of `pack.packed`: shapes and pieces by pack and shape, for a model of these sizes."""
        return {}


def has_expert_bias(args: Mapping[str, Any]) -> bool:
    """Return whether experts and their router have biases, in the form since Megatron Core 0.15,
    which introduced `softmax_type`.

    Since then an expert with biases is not sharded over ranks (`moe/router.py`, `Router`; `TransformerConfig`,
    `__post_init__`). In earlier versions the router has no bias.
    """
    return bool(args.get("num_experts") and args.get("add_bias_linear") and "softmax_type" in args)


def _latent(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention (Megatron Core, `MLATransformerConfig`)."""
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    sizes = {name: args.get(name) for name in (*names, "q_lora_rank")}
    _refuse_no_sizes(sizes, names if sizes["q_lora_rank"] is None else tuple(sizes), "latent attention")
    return sizes


def _linear(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of linear attention (Megatron Core 0.16, `TransformerConfig`)."""
    names = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    sizes: dict[str, Any] = {f"linear_{name}": args.get(f"linear_{name}") for name in names}
    _refuse_no_sizes(sizes, tuple(sizes), "linear attention")
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if values % keys:
        raise ConfigError(f"`linear_num_value_heads` = {values} cannot be shared by `linear_num_key_heads` = {keys}")
    return sizes


def _mamba(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of Mamba mixers (Megatron Core 0.12 to 0.19, `MambaMixer`)."""
    sizes = {**{name: args.get(name) for name in hybrid.SIZES}, "mamba_num_heads": hybrid.num_heads(args)}
    _refuse_no_sizes(sizes, tuple(sizes), "a Mamba mixer")
    heads, groups = sizes["mamba_num_heads"], sizes["mamba_num_groups"]
    if heads % groups:
        raise ConfigError(f"`mamba_num_heads` = {heads} cannot be shared by `mamba_num_groups` = {groups}")
    return sizes


def _refuse_no_sizes(sizes: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    bad = [name for name in names if type(sizes[name]) is not int or sizes[name] < 1]
    if bad:
        raise ConfigError(
            f"the Megatron arguments do not describe {what}", items=[f"{name} = {sizes[name]!r}" for name in bad]
        )
