"""Laying out what a conversion writes: the files of the target, its configuration, and what to tell the user."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.formats import hf, modules, mp_rank_writer, torch_dist_writer
from mcore_convert.formats.base import Checkpoint, Reservation, Training
from mcore_convert.formats.hf import HfCheckpoint
from mcore_convert.formats.mp_rank import MpRankCheckpoint
from mcore_convert.formats.torch_dist import CARRIED
from mcore_convert.identify import Model
from mcore_convert.plan import Sources
from mcore_convert.spec import arguments, bridge
from mcore_convert.spec.command_line import caveats, command_line
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.layout import Layout

FORMATS = ("hf", "torch_dist", "torch")
COMMAND_FILE = "megatron_args.txt"


@dataclass(frozen=True)
class Target:
    """What to write: the format, the layout that Megatron will run, and sizes of files.

    `iteration` names the directory `iter_*`; None writes `release`. `max_shard_size` in bytes, for `hf`.
    `tokenizer` is what the stored arguments name as one, or, for `hf`, where the one comes from that the caller adds.
    `implementation` is the layer spec whose names the `torch` format takes; that of the source unless given.
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
    folder = model.folder
    carried = [] if folder is None else [*hf.carried_files(folder), hf.CONFIG]
    name = "release" if target.iteration is None else f"iter_{target.iteration:07d}"
    hf_folder = target.path / name / CARRIED
    training = model.checkpoint.training if any(item.state != "param" for item in sources.slots) else None
    args = _stored_arguments(model, dims, target, sources.dtype_of, hf_folder, carried)
    _note(model, dims, target, training, args, name, notes)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": target.iteration or 0}
    checkpoint: Checkpoint
    if target.format == "torch":
        source = model.checkpoint
        same = source if isinstance(source, MpRankCheckpoint) else None
        checkpoint, reservation = mp_rank_writer.reserve(
            target.path,
            family,
            dims,
            sources.dtype_of,
            layout,
            iteration=target.iteration,
            common=common,
            training=training,
            implementation=target.implementation or (same.implementation if same else implementation_of(args)),
            experts=same.experts if same else experts_of(args),
        )
    else:
        checkpoint, reservation = torch_dist_writer.reserve(
            target.path,
            dims,
            sources.dtype_of,
            tp=layout.tp,
            etp=layout.etp,
            iteration=target.iteration,
            common=common,
            # of a model that no family knows, the stored arguments say more than a partial `run_config.yaml`
            run_config=None
            if model.refusals
            else bridge.run_config(_with_true_vocabulary(args, model), model.family.name),
            training=training,
        )
    flags = [*command_line(args), *_layout_flags(layout, dims)]
    if training is not None:
        flags.append("--no-load-rng")
    command = shlex.join([*flags, "--load", str(target.path.absolute())])
    reservation.texts = {target.path / COMMAND_FILE: f"{command}\n".encode(), **reservation.texts}
    if folder is not None:
        there = [file for file in carried if (folder / file).is_file()]
        reservation.carried = {hf_folder / file: folder / file for file in there}
    return checkpoint, reservation


def implementation_of(args: Mapping[str, Any]) -> str:
    """The layer spec that a run with these arguments builds; Transformer Engine's unless they say otherwise."""
    return modules.LOCAL if args.get("transformer_impl") == modules.LOCAL else modules.TRANSFORMER_ENGINE


def experts_of(args: Mapping[str, Any]) -> str:
    """How such a run keeps its experts."""
    grouped = args.get("moe_grouped_gemm") and implementation_of(args) == modules.TRANSFORMER_ENGINE
    return modules.GROUPED if grouped else modules.SEQUENTIAL


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


def layout_arguments(layout: Layout, dims: Dims) -> dict[str, Any]:
    """The Megatron arguments that a layout decides."""
    vpp = layout.num_virtual_stages if layout.vpp is not None else None
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "num_layers_per_virtual_pipeline_stage": dims.num_layers // layout.pp // vpp if vpp else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "padded_vocab_size": dims.padded_vocab_size,
        "world_size": layout.ranks_per_stage * layout.pp,
    }


def _layout_flags(layout: Layout, dims: Dims) -> list[str]:
    """The flags of a layout beyond TP, PP and even virtual stages, which `command_line` has."""
    values = {
        "--expert-model-parallel-size": layout.ep if layout.ep > 1 else None,
        "--expert-tensor-parallel-size": layout.etp,
        "--decoder-first-pipeline-num-layers": layout.first_stage_layers,
        "--decoder-last-pipeline-num-layers": layout.last_stage_layers,
        "--pipeline-model-parallel-layout": layout.pipeline_layout,
    }
    flags = [text for flag, value in values.items() if value is not None for text in (flag, str(value))]
    switches = {
        "--account-for-embedding-in-pipeline-split": layout.account_for_embedding,
        "--account-for-loss-in-pipeline-split": layout.account_for_loss,
    }
    return flags + [flag for flag, on in switches.items() if on]


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


def _dtype_flags(dtype_of: Mapping[Item, str]) -> dict[str, Any]:
    """Megatron's dtype arguments as the weights are, whatever the run's arguments said."""
    dtype = next(iter(dtype_of.values()))
    flags = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    return {**flags, "params_dtype": arguments.DTYPES[dtype]} if dtype in arguments.DTYPES else flags
