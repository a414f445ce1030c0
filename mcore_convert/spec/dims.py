"""The sizes of a model, from its Megatron arguments, and the words in which a weight's shape is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.layers import EXPERTS, MLP, Parts, are_stacked, parts_of
from mcore_convert.spec.shard import Shape

MAX_LAYERS = 10_000  # a damaged number must not keep us busy


@dataclass(frozen=True)
class Dims:
    """Sizes in elements, under Megatron's names. `vocab_size` is the true one, without padding.

    `parts` has the parts of each layer; all have experts, or none has, unless given. `stacked`: Megatron Core takes the
    layers for alike, so that one key of `torch_dist` holds a weight of all of them.
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

    def __post_init__(self) -> None:
        if not self.parts:
            part = EXPERTS if self.num_experts else MLP
            object.__setattr__(self, "parts", (frozenset({part}),) * self.num_layers)

    @staticmethod
    def of(args: Mapping[str, Any], *, vocab_size: int, padded_vocab_size: int) -> Dims:
        """From normalised Megatron arguments (`arguments.normalise`).

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
        if args["num_layers"] > MAX_LAYERS:
            raise ConfigError(f"`num_layers` = {args['num_layers']} is more than any model has")
        if args["num_attention_heads"] % args["num_query_groups"]:
            raise ConfigError(
                f"`num_attention_heads` = {args['num_attention_heads']} cannot be shared by "
                f"`num_query_groups` = {args['num_query_groups']}"
            )
        with_experts = bool(args.get("num_experts"))
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
            parts=parts_of(args, args["num_layers"]),
            stacked=are_stacked(args),
        )

    def layers_with(self, part: str | None) -> list[int]:
        """The layers that have a part, or all."""
        return [layer for layer, parts in enumerate(self.parts) if part is None or part in parts]

    def size(self, word: str) -> int:
        """The size that a word of a shape stands for; `vocab` is the true vocabulary."""
        return self._sizes[word]

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {
            "vocab": self.vocab_size,
            "positions": self.max_position_embeddings,
            "hidden": self.hidden_size,
            "heads": self.num_attention_heads * self.kv_channels,
            "qkv": (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels,
            "ffn": self.ffn_hidden_size,
            "gated_ffn": 2 * self.ffn_hidden_size,
            "head": self.kv_channels,
            "experts": self.num_experts or 0,
            "moe_ffn": self.moe_ffn_hidden_size or 0,
            "gated_moe_ffn": 2 * (self.moe_ffn_hidden_size or 0),
            "shared_ffn": self.shared_ffn_hidden_size or 0,
            "gated_shared_ffn": 2 * (self.shared_ffn_hidden_size or 0),
            "one": 1,
        }

    def padded_shape(self, words: tuple[str, ...], *, vocab: bool) -> Shape:
        """The shape as Megatron holds it: a `vocab` row with its padding."""
        shape = self.shape(words)
        return (self.padded_vocab_size, *shape[1:]) if vocab else shape

    def shape(self, words: tuple[str, ...]) -> Shape:
        """The shape that the words of a row describe."""
        if words not in self._shapes:
            self._shapes[words] = tuple(self.size(word) for word in words)
        return self._shapes[words]

    @cached_property
    def _shapes(self) -> dict[tuple[str, ...], Shape]:
        return {}  # asked for every expert of every layer
