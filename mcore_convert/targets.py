"""Laying out what a conversion writes: the files of the target, its configuration, and what to tell the user."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.errors import LayoutError
from mcore_convert.formats import hf, mp_rank_writer, torch_dist_writer
from mcore_convert.formats.base import Checkpoint, Reservation, Training
from mcore_convert.formats.hf import HfCheckpoint
from mcore_convert.formats.torch_dist import CARRIED
from mcore_convert.formats.torch_dist_training import FULLY_RESHARDABLE, MODEL_SPACE
from mcore_convert.identify import Model
from mcore_convert.plan import Sources
from mcore_convert.spec import arguments, bridge, releases
from mcore_convert.spec.command_line import caveats, command_line
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.releases import Release
from mcore_convert.target_arguments import (
    experts_of,
    has_norm_state,
    implementation_of,
    layout_arguments,
    modules_of,
    optimizer_arguments,
)

FORMATS = ("hf", "torch_dist", "torch")
COMMAND_FILE = "megatron_args.txt"


@dataclass(frozen=True)
class Target:
    """What to write: the format, the layout that Megatron will run, and sizes of files.

    `iteration` names the directory `iter_*`; None writes `release`. `max_shard_size` in bytes, for `hf`.
    `tokenizer` is what the stored arguments name as one, or, for `hf`, where the one comes from that the caller adds.
    `implementation` is the layer spec whose names a Megatron format takes; that of the source unless given.
    `release` of Megatron-LM is the one to load it; that which wrote the source where it can be told, else the newest.
    `allow_drift` takes the first rank's copy where ranks of the source disagree on what all of them hold.
    `dtype` rounds the weights, for `hf`; they stay as stored unless given.
    """

    path: Path
    format: str
    layout: Layout = Layout()
    iteration: int | None = None
    max_shard_size: int = hf.DEFAULT_SHARD_SIZE
    tokenizer: str | None = None
    implementation: str | None = None
    optimizer: bool = True
    allow_drift: bool = False
    dtype: str | None = None
    release: Release | None = None


def lay_out_hf(model: Model, target: Target, sources: Sources, notes: list[str]) -> tuple[Checkpoint, Reservation]:
    """A Hugging Face directory: its configuration is synthesised, or the original one corrected."""
    dtype_of = sources.dtype_of
    cast = target.dtype is not None and set(dtype_of.values()) != {target.dtype}
    if target.dtype is not None and cast:
        rounded = "" if target.dtype == "float32" else ", rounded to nearest"
        notes.append(f"weights in {' and '.join(sorted(set(dtype_of.values())))} become {target.dtype}{rounded}")
        dtype_of = dict.fromkeys(dtype_of, target.dtype)
    args = {**model.args, **_dtype_flags(dtype_of)}
    from_hf = isinstance(model.checkpoint, HfCheckpoint)
    if from_hf and not cast and model.config is not None:
        config: Mapping[str, Any] = model.config
    elif model.config is None:
        config = model.family.config.to_hf(args)
        if model.folder is None and target.tokenizer is None:
            notes.append(
                "no original configuration: which tokens begin and end a text is not known, and no tokenizer is "
                "carried along; --hf-config DIR supplies both"
            )
    else:
        config, changes = model.family.config.merge(model.config, args)
        of_dtype = ("`dtype`", "`torch_dtype`") if cast else ()
        notes += [f"config.json: {line}, as the checkpoint has it" for line in changes if not line.startswith(of_dtype)]
    if model.dims.padded_vocab_size != model.dims.vocab_size:
        notes.append(
            f"{model.dims.padded_vocab_size} embedding rows are cut to the vocabulary of {model.dims.vocab_size}"
        )
    checkpoint, reservation = hf.reserve(target.path, model.family, model.dims, config, dtype_of, target.max_shard_size)
    folder = model.folder
    if folder is not None:
        there = [name for name in hf.carried_files(folder) if from_hf or name != hf.CARD]  # it describes the original
        reservation.carried = {target.path / name: folder / name for name in there}
    return checkpoint, reservation


def lay_out_megatron(
    model: Model, family: Family, dims: Dims, target: Target, sources: Sources, notes: list[str]
) -> tuple[Checkpoint, Reservation]:
    """A Megatron directory in either format, with its arguments, its command line, and the original's other files."""
    layout = target.layout
    layout.check(dims)
    if layout.pipeline_layout is not None and target.release is not None and target.release < releases.PIPELINE_LAYOUT:
        since, given = releases.spelled(releases.PIPELINE_LAYOUT), releases.spelled(target.release)
        raise LayoutError(f"a pipeline layout needs Megatron-LM {since} or later, not {given}")
    folder = model.folder
    carried = [] if folder is None else [*hf.carried_files(folder), hf.CONFIG]
    name = "release" if target.iteration is None else f"iter_{target.iteration:07d}"
    hf_folder = target.path / name / CARRIED
    training = model.checkpoint.training if any(item.state != "param" for item in sources.slots) else None
    args = _stored_arguments(model, dims, target, sources.dtype_of, hf_folder, carried)
    release = target.release or releases.of_run(args) or releases.NEWEST
    args |= modules_of(model.checkpoint, args, target.implementation)
    if training is not None:
        args |= optimizer_arguments(training, target.format, release, args)
    _note(model, dims, target, training, args, name, notes)
    if training is not None:
        notes += _loaded_by(training, target, release)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": target.iteration or 0}
    checkpoint: Checkpoint
    if target.format == "torch":
        checkpoint, reservation = mp_rank_writer.reserve(
            target.path,
            family,
            dims,
            sources.dtype_of,
            layout,
            iteration=target.iteration,
            common=common,
            training=training,
            implementation=implementation_of(args),
            experts=experts_of(args),
            release=release,
            norm_state=has_norm_state(model.checkpoint),
        )
    else:
        checkpoint, reservation = torch_dist_writer.reserve(
            target.path,
            dims,
            sources.dtype_of,
            tp=layout.tp,
            iteration=target.iteration,
            common=common,
            # of a model that no family knows, the stored arguments say more than a partial `run_config.yaml`
            run_config=None
            if model.refusals
            else bridge.run_config(_with_true_vocabulary(args, model), model.family.name),
            training=training,
            release=release,
        )
    flags = command_line(args, optimizer=training is not None)
    if training is not None:
        flags += ["--use-checkpoint-opt_param-scheduler"] if training.scheduler is not None else []
        flags += ["--no-load-rng"]
    command = shlex.join([*flags, "--load", str(target.path.absolute())])
    reservation.texts = {target.path / COMMAND_FILE: f"{command}\n".encode(), **reservation.texts}
    if folder is not None:
        there = [file for file in carried if (folder / file).is_file()]
        reservation.carried = {hf_folder / file: folder / file for file in there}
    return checkpoint, reservation


def _stored_arguments(
    model: Model, dims: Dims, target: Target, dtype_of: Mapping[Item, str], hf_folder: Path, carried: list[str]
) -> dict[str, Any]:
    """The run's own arguments where there are some, changed in what the layout changes; else a full new set."""
    layout = target.layout
    source = model.checkpoint
    stored = None if isinstance(source, HfCheckpoint) else source.common.args
    if stored is not None:
        args = arguments.plain(stored)
        args |= _dtype_flags(dtype_of)
    else:
        has_tokenizer = any(file.startswith(("tokenizer", "vocab")) for file in carried)
        args = arguments.complete(
            {**arguments.plain(model.args), **_dtype_flags(dtype_of)},
            dtype=next(iter(dtype_of.values())),
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            iteration=target.iteration or 0,
            tokenizer_model=target.tokenizer or (str(hf_folder.absolute()) if has_tokenizer else None),
            vocab_size=model.dims.vocab_size,
        )
    return {**args, **layout_arguments(layout, dims), "ckpt_format": target.format}


def _with_true_vocabulary(args: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The arguments with a `vocab_size` that is the vocabulary, which a run leaves to its tokenizer."""
    return {**args, "vocab_size": model.dims.vocab_size, "tokenizer_type": None}


def _note(
    model: Model,
    dims: Dims,
    target: Target,
    training: Training | None,
    args: Mapping[str, Any],
    name: str,
    notes: list[str],
) -> None:
    """What a user should know of a Megatron target."""
    layout, vocab = target.layout, model.dims.vocab_size
    if isinstance(model.checkpoint, HfCheckpoint) and dims.padded_vocab_size != vocab:
        notes.append(f"the vocabulary of {vocab} is padded to {dims.padded_vocab_size} rows for tp = {layout.tp}")
    elif dims.padded_vocab_size != model.dims.padded_vocab_size:
        notes.append(
            f"{model.dims.padded_vocab_size} embedding rows become {dims.padded_vocab_size} for tp = {layout.tp}"
        )
    if layout.tp > dims.num_query_groups:
        notes.append(f"tp = {layout.tp} exceeds `num_query_groups`: such a run needs Megatron Core 0.16 or later")
    if training is not None:
        notes.append("random states of the ranks are not carried over: resume with --no-load-rng")
    elif target.iteration is not None:
        notes.append(f"Megatron-LM loads `{name}` with --finetune, or with --no-load-optim --no-load-rng")
    notes += caveats(args)


def _loaded_by(training: Training, target: Target, release: Release) -> list[str]:
    """Which versions of Megatron-LM load the optimizer's state, where others do not."""
    if not training.distributed or target.format != "torch_dist":
        return []
    since = releases.spelled(releases.FULLY_RESHARDABLE)
    if release >= releases.FULLY_RESHARDABLE:
        form, which = FULLY_RESHARDABLE, f"Megatron-LM {since} and later load it, --for-megatron 0.14 is for older ones"
    else:
        form, which = MODEL_SPACE, f"Megatron-LM up to {since} loads it, --for-megatron {since} is for newer ones"
    return [f"optimizer state is written as `{form}`: {which}"]


def _dtype_flags(dtype_of: Mapping[Item, str]) -> dict[str, Any]:
    """Megatron's dtype arguments as the weights are, whatever the run's arguments said."""
    dtype = next(iter(dtype_of.values()))
    flags = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    return {**flags, "params_dtype": arguments.DTYPES[dtype]} if dtype in arguments.DTYPES else flags
