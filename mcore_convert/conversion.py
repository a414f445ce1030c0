"""Planning a conversion between two formats: which files, which configuration, and what to tell the user."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConvertError
from mcore_convert.formats import hf, torch_dist_writer
from mcore_convert.formats.base import Checkpoint, Reservation
from mcore_convert.formats.hf import HfCheckpoint
from mcore_convert.formats.torch_dist import CARRIED, TorchDistCheckpoint, check_whole
from mcore_convert.identify import Model
from mcore_convert.plan import Plan, Sources, find_weights, moves_between
from mcore_convert.spec import arguments, bridge
from mcore_convert.spec.command_line import caveats, command_line
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Weight
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import Index

FORMATS = ("hf", "torch_dist")
COMMAND_FILE = "megatron_args.txt"


@dataclass(frozen=True)
class Target:
    """What to write: the format, the layout that Megatron will run, and sizes of files.

    `iteration` names the directory `iter_*`; None writes `release`. `max_shard_size` in bytes, for `hf`.
    """

    path: Path
    format: str
    layout: Layout = Layout()
    iteration: int | None = None
    max_shard_size: int = hf.DEFAULT_SHARD_SIZE
    tokenizer: str | None = None


def plan_conversion(model: Model, target: Target) -> Plan:
    """Plan a conversion completely; nothing is written.

    Raises:
        ConvertError: the source is not whole, a weight has no place, the configuration cannot be represented, or the
            layout does not fit.
    """
    if target.format not in FORMATS:
        raise ConvertError(f"there is no format `{target.format}`", hint=f"known are {', '.join(FORMATS)}")
    source = model.checkpoint
    notes = list(model.notes)
    if isinstance(source, TorchDistCheckpoint):
        check_whole(source)
        if source.optimizer_keys:
            notes.append(f"optimizer state is left behind ({len(source.optimizer_keys)} keys)")
    sources = find_weights(model.family, model.dims, source)
    checkpoint: Checkpoint
    if target.format == "hf":
        checkpoint, reservation, dims = _to_hf(model, target, sources, notes)
    else:
        checkpoint, reservation, dims = _to_torch_dist(model, target, sources, notes)
    moves = moves_between(model.family, dims, sources, checkpoint)
    return Plan(model.family, dims, source, checkpoint, reservation, moves, sources.checks, tuple(notes))


def _to_hf(model: Model, target: Target, sources: Sources, notes: list[str]) -> tuple[Checkpoint, Reservation, Dims]:
    dtype_of = sources.dtype_of
    args = {**model.args, **_dtype_flags(dtype_of)}
    if isinstance(model.checkpoint, HfCheckpoint):
        config: Mapping[str, Any] = model.checkpoint.config
    elif model.config is None:
        config = model.family.config.to_hf(args)
        if model.folder is None:
            notes.append(
                "no original configuration: which tokens begin and end a text is not known, and no tokenizer is "
                "carried along; --hf-config DIR supplies both"
            )
    else:
        config, changes = model.family.config.merge(model.config, args)
        notes += [f"config.json: {change}, as the checkpoint has it" for change in changes]
    if model.dims.padded_vocab_size != model.dims.vocab_size:
        notes.append(
            f"{model.dims.padded_vocab_size} embedding rows are cut to the vocabulary of {model.dims.vocab_size}"
        )
    checkpoint, reservation = hf.reserve(target.path, model.family, model.dims, config, dtype_of, target.max_shard_size)
    folder = model.folder
    if folder is not None:
        reservation.carried = {target.path / name: folder / name for name in hf.carried_files(folder)}
    return checkpoint, reservation, model.dims


def _to_torch_dist(
    model: Model, target: Target, sources: Sources, notes: list[str]
) -> tuple[Checkpoint, Reservation, Dims]:
    layout = target.layout
    vocab = model.dims.vocab_size
    padded = arguments.padded_vocab_size(vocab, layout.tp)
    dims = Dims.of(model.args, vocab_size=vocab, padded_vocab_size=padded)
    layout.check(dims)
    dtype_of = sources.dtype_of
    folder = model.folder
    carried = [] if folder is None else [*hf.carried_files(folder), hf.CONFIG]
    name = "release" if target.iteration is None else f"iter_{target.iteration:07d}"
    hf_folder = target.path / name / CARRIED
    has_tokenizer = any(file.startswith(("tokenizer", "vocab")) for file in carried)
    tokenizer = target.tokenizer or (str(hf_folder.absolute()) if has_tokenizer else None)
    args = arguments.complete(
        {**arguments.plain(model.args), **_dtype_flags(dtype_of)},
        dtype=next(iter(dtype_of.values())),
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        iteration=target.iteration or 0,
        tokenizer_model=tokenizer,
        vocab_size=vocab,
    )
    if padded != vocab:
        notes.append(f"the vocabulary of {vocab} is padded to {padded} rows for tp = {layout.tp}")
    if layout.tp > dims.num_query_groups:
        notes.append(f"tp = {layout.tp} exceeds `num_query_groups`: such a run needs Megatron Core 0.16 or later")
    if target.iteration is not None:
        notes.append(f"Megatron-LM loads `{name}` with --finetune, or with --no-load-optim --no-load-rng")
    notes += caveats(args)
    checkpoint, reservation = torch_dist_writer.reserve(
        target.path,
        dims,
        dtype_of,
        tp=layout.tp,
        iteration=target.iteration,
        common={"args": args, "checkpoint_version": 3.0, "iteration": target.iteration or 0},
        run_config=bridge.run_config(args, model.family.name),
    )
    command = shlex.join([*command_line(args), "--load", str(target.path.absolute())])
    reservation.texts = {target.path / COMMAND_FILE: f"{command}\n".encode(), **reservation.texts}
    if folder is not None:
        there = [file for file in carried if (folder / file).is_file()]
        reservation.carried = {hf_folder / file: folder / file for file in there}
    return checkpoint, reservation, dims


def _dtype_flags(dtype_of: Mapping[tuple[Weight, Index], str]) -> dict[str, bool]:
    """Megatron's dtype arguments as the weights are, whatever the run's arguments said."""
    dtype = next(iter(dtype_of.values()))
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
