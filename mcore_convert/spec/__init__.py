"""Conversions as data: names, packs, shards, layouts, sizes and families, with their algebra. Reads no file."""

from mcore_convert.spec import vary
from mcore_convert.spec.config.mapping import ConfigMapping
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import (
    Family,
    Spelling,
    Weight,
    buffer,
    column,
    gated_column,
    must_be_zero,
    replicated,
    row,
    segmented,
    vocab,
)
from mcore_convert.spec.layout import Layout, Rank
from mcore_convert.spec.names import Index
from mcore_convert.spec.pack import QKV, Concat, Every, Fused, Interleaved, Pack, Piece, Same, Segments, Transposed
from mcore_convert.spec.shard import Box, Shard

__all__ = [
    "QKV",
    "Box",
    "Concat",
    "ConfigMapping",
    "Dims",
    "Every",
    "Family",
    "Fused",
    "Index",
    "Interleaved",
    "Layout",
    "Pack",
    "Piece",
    "Rank",
    "Same",
    "Segments",
    "Shard",
    "Spelling",
    "Transposed",
    "Weight",
    "buffer",
    "column",
    "gated_column",
    "must_be_zero",
    "replicated",
    "row",
    "segmented",
    "vary",
    "vocab",
]
