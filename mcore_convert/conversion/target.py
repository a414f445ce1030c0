"""Layout of a target: its files, its configuration, and the notes to the user."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.identify import Model
from mcore_convert.checkpoints.weights import Sources
from mcore_convert.conversion import resumption
from mcore_convert.conversion.target_arguments import (
    experts_of,
    implementation_of,
    layout_arguments,
    modules_of,
    optimizer_arguments,
    pattern_arguments,
    refuse_young,
)
from mcore_convert.formats.base import Checkpoint, Side, Training
from mcore_convert.formats.files.json_file import json_bytes
from mcore_convert.formats.files.model_folder import CARD, CONFIG, carried_files
from mcore_convert.formats.megatron.run_directory import CARRIED, name_of
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.registry import arguments_of, options_for, target_named
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.options import SourceOptions
from mcore_convert.spec import releases
from mcore_convert.spec.config import arguments, completion
from mcore_convert.spec.config.command_line import caveats, command_line
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.gpt import WEIGHT_SHARDS
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import PARAM
from mcore_convert.spec.releases import Release

COMMAND_FILE = "megatron_args.txt"


@dataclass(frozen=True)
class Target:
    """Description of a target: the format, the layout that Megatron will run, and sizes of files.

    `iteration` names the directory `iter_*`; None writes `release`. `tokenizer` is the one that the stored arguments
    name, or, on Hugging Face's side, the origin of the one that the caller adds. `release` is the Megatron-LM release
    that will load it; unless given, the one that wrote the source if known, else the newest.
    `allow_drift` uses the first rank's copy where ranks of the source disagree on values that all of them hold.
    `from_master` writes master copies in place of the weights on Hugging Face's side.
    `dtype` rounds the weights on Hugging Face's side; they stay as stored unless given. `options` are the format's own;
    None means not given. `reading` are the user's options for the source, for the manifest.
    """

    path: Path
    format: str
    layout: Layout = Layout()
    iteration: int | None = None
    tokenizer: str | None = None
    optimizer: bool = True
    allow_drift: bool = False
    dtype: str | None = None
    from_master: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    release: Release | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        """Options of the user in plain values: all that differ from their defaults."""
        every = {
            "to": self.format,
            **{name: value for name, value in vars(self.layout).items() if value != getattr(Layout(), name)},
            "iteration": self.iteration,
            "tokenizer": self.tokenizer,
            "no_optimizer": not self.optimizer or None,
            "allow_drift": self.allow_drift or None,
            "dtype": self.dtype,
            "from_master": self.from_master or None,
            "for_megatron": None if self.release is None else releases.spelled(self.release),
            **self.options,
            **self.reading,
        }
        return {name: value for name, value in every.items() if value is not None}


def reading_of(options: SourceOptions) -> dict[str, Any]:
    """Return the options for a source, in plain values without paths of the machine; None where not given."""
    hf_config = options.get("hf_config")
    return {
        "family": options.get("family"),
        "hf_config": None if hf_config is None else Path(hf_config).name,
        "ignore_key": [*options.get("ignore_keys", ())] or None,
        "vocab_size": options.get("vocab_size"),
        "arg": dict(options.get("given") or {}) or None,
    }


def lay_out_hf(model: Model, target: Target, sources: Sources, notes: list[str]) -> tuple[Checkpoint, Reservation]:
    """Lay out a Hugging Face directory with a synthesised configuration, or the original one corrected."""
    dtype_of = sources.dtype_of
    trained = {dtype for item, dtype in dtype_of.items() if item.weight.trained}  # buffers stay as they are
    cast = target.dtype is not None and trained != {target.dtype}
    if target.dtype is not None and cast:
        rounded = "" if target.dtype == "float32" else ", rounded to nearest"
        notes.append(f"weights in {' and '.join(sorted(trained))} become {target.dtype}{rounded}")
        dtype_of = {item: target.dtype if item.weight.trained else dtype for item, dtype in dtype_of.items()}
    run = _rounded_to(model.checkpoint)
    if target.dtype is None and run is not None:
        notes.append(f"weights stay float32, as the optimizer trains them: --dtype {run} rounds them as the run does")
    args = {**model.args, **_dtype_flags(dtype_of)}
    from_hf = model.checkpoint.side is Side.HUGGING_FACE
    own = model.checkpoint.original_config
    if own is not None and not cast:
        config: Mapping[str, Any] = own
    elif model.config is None:
        config = model.family.config.to_hf(args)
        if model.folder is None and target.tokenizer is None:
            notes.append(
                "no original configuration: which tokens begin and end a text is not known, and no tokenizer is "
                "carried along; --hf-config DIR supplies both"
            )
        elif target.tokenizer is None:
            notes.append(
                "no original configuration: which tokens begin and end a text is not known; --hf-config DIR supplies it"
            )
    else:
        config, changes = model.family.config.merge(model.config, args)
        of_dtype = ("`dtype`", "`torch_dtype`") if cast else ()
        notes += [f"config.json: {line}, as the checkpoint has it" for line in changes if not line.startswith(of_dtype)]
    if model.dims.padded_vocab_size != model.dims.vocab_size:
        notes.append(
            f"{model.dims.padded_vocab_size} embedding rows are cut to the vocabulary of {model.dims.vocab_size}"
        )
    request = Request(target.path, model.family, model.dims, dtype_of, _options(target), config=config)
    checkpoint, reservation = _reserve(target, request)
    quantised = checkpoint.quantised
    if quantised is not None:
        notes.append(f"quantised: {quantised}; {quantised.loss} is lost")
    folder = model.folder
    if folder is not None:
        there = [name for name in carried_files(folder) if from_hf or name != CARD]  # the card describes the original
        reservation.carried = {target.path / name: folder / name for name in there}
    return checkpoint, reservation


def lay_out_megatron(
    model: Model, family: Family, dims: Dims, target: Target, sources: Sources, notes: list[str]
) -> tuple[Checkpoint, Reservation]:
    """Lay out a Megatron directory: its format, arguments, command line, and the original's other files."""
    layout = target.layout.of_model(dims)
    layout.check(dims)
    target = replace(target, layout=layout)
    if target.release is not None:
        refuse_young(model.args, dims, layout, target.release)
    folder = model.folder
    carried = [] if folder is None else [*carried_files(folder), CONFIG]
    name = name_of(target.iteration)
    hf_folder = target.path / name / CARRIED
    training = model.checkpoint.training if any(item.state != "param" for item in sources.slots) else None
    of_run = _dtypes_of_run(model.checkpoint, sources.dtype_of)
    dtype_of = _whole_states(sources.dtype_of if target.format == model.checkpoint.format else of_run)
    args = _stored_arguments(model, dims, target, of_run, hf_folder, carried)
    release = target.release or releases.of_run(args) or releases.NEWEST
    args |= pattern_arguments(layout, dims, release)
    args |= modules_of(model.checkpoint.layer_spec, args, target.options.get("implementation"))
    if training is not None:
        resume = target_named(target.format).resume(training, release, args)
        args |= {**optimizer_arguments(training), **resume.arguments}
    goes_on = training is not None and target.iteration == training.iteration
    random = resumption.random_states(model.checkpoint, target.format, layout) if goes_on else None
    _note(model, dims, target, training, args, name, notes, random)
    if training is not None:
        notes += resume.notes
    common = {"args": args, "checkpoint_version": 3.0, "iteration": target.iteration or 0}
    request = Request(
        target.path,
        family,
        dims,
        dtype_of,
        _options(target),
        common=common,
        layout=layout,
        iteration=target.iteration,
        training=training,
        run_config=resumption.run_config(model, args, optimizer=training is not None, random=random is not None),
        random_states=random,
        layer_spec=LayerSpec(implementation_of(args), experts_of(args)),
        norm_state=model.checkpoint.norm_state,
        release=release,
    )
    checkpoint, reservation = _reserve(target, request)
    if not checkpoint.weights_are_masters and of_run != sources.dtype_of:
        notes.append(f"weights that are held in float32 become {_rounded_to(model.checkpoint)}, as the run rounds them")
    if training is not None and model.checkpoint.format == target.format:
        reservation.carried = dict(model.checkpoint.progress_files(target.path, name))
    flags = command_line(args, optimizer=training is not None)
    if training is not None:
        flags += ["--use-checkpoint-opt_param-scheduler"] if training.scheduler is not None else []
        flags += ["--no-load-rng"] if random is None else []
    if target_named(target.format).ckpt_format is not None:
        command = shlex.join([*flags, "--load", str(target.path.absolute())])
        reservation.texts = {target.path / COMMAND_FILE: os.fsencode(f"{command}\n"), **reservation.texts}
    if folder is not None:
        there = [file for file in carried if (folder / file).is_file()]
        reservation.carried |= {hf_folder / file: folder / file for file in there}
        if model.checkpoint.quantised is not None and model.config is not None:
            reservation.texts[hf_folder / CONFIG] = json_bytes(model.config)  # describes the written weights
    return checkpoint, reservation


def _whole_states(dtype_of: Mapping[Item, str]) -> dict[Item, str]:
    """Return the dtypes with every optimizer state in fp32, as Megatron Core stores any precision."""
    return {item: dtype if item.state == PARAM else "float32" for item, dtype in dtype_of.items()}


def _options(target: Target) -> Any:
    return options_for(target_named(target.format), target.options)


def _reserve(target: Target, request: Request) -> tuple[Checkpoint, Reservation]:
    reserve = target_named(target.format).reserve
    assert reserve is not None
    return reserve(request)


def _stored_arguments(
    model: Model, dims: Dims, target: Target, dtype_of: Mapping[Item, str], hf_folder: Path, carried: list[str]
) -> dict[str, Any]:
    """Return the run's own arguments, changed for the layout; a full new set if the source stores none."""
    layout = target.layout
    source = model.checkpoint
    stored = source.common.args
    if stored is not None:
        args = arguments.plain(stored)
        args |= _dtype_flags(dtype_of)
    else:
        has_tokenizer = any(file.startswith(("tokenizer", "vocab")) for file in carried)
        args = completion.complete(
            {**arguments.plain(model.args), **_dtype_flags(dtype_of)},
            dtype=next(iter(dtype_of.values())),
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            iteration=target.iteration or 0,
            tokenizer_model=target.tokenizer or (str(hf_folder.absolute()) if has_tokenizer else None),
            vocab_size=model.dims.vocab_size,
        )
    decided = layout_arguments(layout, dims)
    shards = {name: decided[size] for name, size in WEIGHT_SHARDS.items() if args.get(name) is not None}
    return {**args, **decided, **shards, **arguments_of(target_named(target.format), args)}


def _rounded_to(source: Checkpoint) -> str | None:
    """Return the dtype in which a run computes with its fp32 weights; None if it computes in the dtype of the weights.

    Weights that are held as master copies are rounded in use.
    """
    args = source.common.args or {}
    if not source.weights_are_masters:
        return None
    return "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else None


def _dtypes_of_run(source: Checkpoint, dtype_of: Mapping[Item, str]) -> dict[Item, str]:
    """Return the dtypes of the tensors, where weights held as master copies have the dtype of the run."""
    run = _rounded_to(source)
    if run is None:
        return dict(dtype_of)
    return {item: run if item.state == PARAM and item.weight.trained else dtype for item, dtype in dtype_of.items()}


def _note(
    model: Model,
    dims: Dims,
    target: Target,
    training: Training | None,
    args: Mapping[str, Any],
    name: str,
    notes: list[str],
    random: RandomStates | None,
) -> None:
    """Add the notes to the user about a Megatron target."""
    layout, vocab = target.layout, model.dims.vocab_size
    if model.checkpoint.side is Side.HUGGING_FACE and dims.padded_vocab_size != vocab:
        notes.append(f"the vocabulary of {vocab} is padded to {dims.padded_vocab_size} rows for tp = {layout.tp}")
    elif dims.padded_vocab_size != model.dims.padded_vocab_size:
        notes.append(
            f"{model.dims.padded_vocab_size} embedding rows become {dims.padded_vocab_size} for tp = {layout.tp}"
        )
    if layout.tp > dims.num_query_groups:
        notes.append(f"tp = {layout.tp} exceeds `num_query_groups`: such a run needs Megatron Core 0.16 or later")
    if training is not None:
        if random is None:
            notes.append("random states of the ranks are not carried over: resume with --no-load-rng")
        else:
            notes.append(f"random states of the ranks go along, {random.words}")
    elif target.iteration is not None:
        notes.append(f"Megatron-LM loads `{name}` with --finetune, or with --no-load-optim --no-load-rng")
    notes += caveats(args)


def _dtype_flags(dtype_of: Mapping[Item, str]) -> dict[str, Any]:
    """Return Megatron's dtype arguments for the dtype of the weights, whatever the run's arguments were."""
    dtype = next(iter(dtype_of.values()))
    flags = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    return {**flags, "params_dtype": arguments.DTYPES[dtype]} if dtype in arguments.DTYPES else flags
