"""A large checkpoint of rank files with optimizer state: reserved by our writer, and filled from one random block."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints import BLOCK, LLAMA, random_bfloat16, write_headers
from mcore_convert.checkpoints import families
from mcore_convert.checkpoints.weights import items_of
from mcore_convert.conversion.target_arguments import layout_arguments
from mcore_convert.formats.base import Findings, Training
from mcore_convert.formats.megatron.modules import SEQUENTIAL, TRANSFORMER_ENGINE
from mcore_convert.formats.megatron.options import MegatronOptions
from mcore_convert.formats.mp_rank import writer as mp_rank_writer
from mcore_convert.formats.mp_rank.directory import MpRankCheckpoint
from mcore_convert.formats.request import Request
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec import Dims, Layout, gpt
from mcore_convert.spec.config import arguments, completion
from mcore_convert.spec.family import Family
from mcore_convert.spec.names import ADAM, MASTER, PARAM
from mcore_convert.storage.views import Slot

# A quarter of Llama 3.2-1B: a quarter of its layers and of its vocabulary, 0.31 billion parameters.
QUARTER: dict[str, Any] = LLAMA | {"num_hidden_layers": 4, "vocab_size": 32064}
ITERATION = 1000
GROUP = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "step": ITERATION, "lr_mult": 1.0, "is_expert_parallel": False}


def make_ranks(path: Path, config: dict[str, Any], layout: Layout) -> Path:
    """Write a bfloat16 Llama with fp32 master copies and moments, as under Megatron's plain optimizer.

    Every master copy rounds to its weight, and replicas are equal on all ranks.
    """
    checkpoint, family, dims = reserve_ranks(path, config, layout)
    _fill(checkpoint, family, dims)
    return path


def reserve_ranks(
    path: Path, config: dict[str, Any], layout: Layout, *, name: str = "llama", distributed: bool = False
) -> tuple[MpRankCheckpoint, Family, Dims]:
    """Write the same with holes for all values, for the family `name`; `distributed`: with `distrib_optim.pt`."""
    normal = arguments.normalise(families.named(name).config.to_megatron(config))
    vocab = normal["vocab_size"]
    dims = Dims.of(normal, vocab_size=vocab, padded_vocab_size=arguments.padded_vocab_size(vocab, layout.tp))
    family = gpt.family(normal)
    items = list(items_of(family, dims, (PARAM, MASTER, *ADAM)))
    complete = completion.complete(
        {**arguments.plain(normal), "bf16": True},
        dtype="bfloat16",
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        iteration=ITERATION,
        tokenizer_model=None,
        vocab_size=vocab,
    )
    request = Request(
        path,
        family,
        dims,
        {item: "bfloat16" if item.state == PARAM else "float32" for item in items},
        MegatronOptions(),
        layout=layout,
        iteration=ITERATION,
        common={
            "args": {**complete, **layout_arguments(layout, dims)},
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
        },
        training=Training(
            ITERATION,
            distributed=distributed,
            groups=({**GROUP, "wd_mult": 1.0, "weight_decay": 0.1}, {**GROUP, "wd_mult": 0.0, "weight_decay": 0.0}),
        ),
        layer_spec=LayerSpec(TRANSFORMER_ENGINE, SEQUENTIAL),
    )
    checkpoint, reservation = mp_rank_writer.reserve(request)
    write_headers(reservation)
    return checkpoint, family, dims


def _fill(checkpoint: MpRankCheckpoint, family: Family, dims: Dims) -> None:
    halves = random_bfloat16(BLOCK)
    lower = np.random.default_rng(1).integers(0, 1 << 15, BLOCK, dtype=np.uint32)  # less than half of the last bit
    blocks = {"bfloat16": halves, "float32": halves.astype(np.uint32) << 16 | lower}
    files = {file.path: os.open(file.path, os.O_WRONLY) for file in checkpoint.files.values()}
    try:
        for slot, start in _slots(checkpoint, family, dims):
            block, at = blocks[slot.view.dtype], slot.view.offset
            left = slot.box.numel
            while left:
                piece = block[start : start + left]
                at += os.pwrite(files[slot.view.path], piece.data, at)
                left, start = left - len(piece), 0
    finally:
        for fd in files.values():
            os.close(fd)


def _slots(checkpoint: MpRankCheckpoint, family: Family, dims: Dims) -> Iterator[tuple[Slot, int]]:
    """Yield every slot of every rank, and the element of the block that fills its start, the same in all states."""
    for item in items_of(family, dims, (PARAM, MASTER, *ADAM)):
        again = (slot for slot, _ in checkpoint.replicas(item, dims))
        for slot in (*checkpoint.locate(item, dims, Findings()), *again):
            yield slot, zlib.crc32(f"{item._replace(state=PARAM)} {slot.box.offsets}".encode()) % BLOCK
