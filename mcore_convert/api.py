"""The public functions behind the commands."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from mcore_convert.checkpoints.download import downloaded, existing, local_path, streamed
from mcore_convert.checkpoints.identify import Model, identify, in_one_family, model_of, open_checkpoint
from mcore_convert.comparison.equality import Verification, compare
from mcore_convert.comparison.integrity import Integrity, check_integrity
from mcore_convert.comparison.logits import TOLERANCE
from mcore_convert.conversion.execute import execute, expected_memory
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.prepare import plan_conversion
from mcore_convert.conversion.target import COMMAND_FILE, Target, reading_of
from mcore_convert.errors import ConvertError
from mcore_convert.formats.base import Side
from mcore_convert.formats.registry import default_target, options_for, target_named, targets
from mcore_convert.inspection.report import diff, inspect
from mcore_convert.options import (
    ConvertOptions,
    FamilyOptions,
    LayoutOptions,
    ModelOptions,
    PathLike,
    check_names,
    part_of,
)
from mcore_convert.spec import releases
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.destination import check_free
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Progress
from mcore_convert.storage.remote import RemotePath, located
from mcore_convert.storage.sending import source_at
from mcore_convert.storage.sources import Stamp, watched
from mcore_convert.storage.views import file_errors


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion, or of its plan (`dry_run`). Sizes in bytes."""

    plan: Plan
    dry_run: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user: what was cut, padded, left behind or changed."""
        return self.plan.notes

    @property
    def command(self) -> str | None:
        """Megatron-LM command line of the model; None for a target that is not Megatron's."""
        for path, content in self.plan.reservation.texts.items():
            if path.name == COMMAND_FILE:
                return os.fsdecode(content).strip()
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plan = self.plan
        return {
            "source": {
                "path": str(plan.source.path),
                "format": plan.source.format,
                "tensors": len(plan.source.tensors),
            },
            "target": {
                "path": str(plan.reservation.path),
                "format": plan.target.format,
                "tensors": len(plan.target.tensors),
                "files": {
                    str(p.relative_to(plan.reservation.path)): size for p, size in plan.reservation.sizes.items()
                },
                "nbytes": plan.reservation.nbytes,
            },
            "family": plan.family.name,
            "num_parameters": plan.num_parameters,
            "nbytes": plan.nbytes,
            "copies": sum(len(move.copies) for move in plan.moves),
            "expected_memory": expected_memory(plan),
            "dry_run": self.dry_run,
            "notes": list(plan.notes),
            "command": self.command,
        }


@file_errors()
def convert(source: PathLike, destination: PathLike, **options: Unpack[ConvertOptions]) -> Conversion:
    """Convert a checkpoint into another format.

    Args:
        source: a Hugging Face or Megatron directory, or a Hub id.
        destination: the directory to create. It appears when it is complete; until then it is `destination.partial`.
        options: format (`to`), layout, source, target and run, as listed in `mcore_convert.options.ConvertOptions`. The
            layout is that of a Megatron target: `torch` has a file for each of its ranks; `torch_dist` can be loaded at
            any layout, which only decides its chunks, the vocabulary padding and the stored arguments.

    Raises:
        ConvertError: the conversion is refused; nothing is left behind. See `mcore_convert.errors` for the kinds.
        TypeError: an option does not exist.
    """
    check_names("convert", ConvertOptions, options)
    final = located(destination)
    _check_free(final, options)
    stream, revision = options.get("stream", False), options.get("revision")
    path = existing(source)
    if path is not None:
        _refuse_idle("a directory", {"revision": revision, "stream": stream or None})
    else:
        path = streamed(str(source), revision) if stream else downloaded(str(source), revision)
    with phase(options.get("progress"), "opening"), watched() as opened:
        model = model_of(open_checkpoint(path, options.get("given")), **part_of(FamilyOptions, options))
    return _convert(model, final, options, opened)


@file_errors()
def reshard(source: PathLike, destination: PathLike, **options: Unpack[ConvertOptions]) -> Conversion:
    """Convert a Megatron checkpoint to another layout, together with its optimizer state.

    Args:
        source: a Megatron directory.
        destination: the directory to create.
        options: as for `convert`; `to` is the format of the source unless given, `torch_dist` for zarr.

    Raises:
        ConvertError: as `convert`; or the source is not Megatron's.
        TypeError: an option does not exist.
    """
    check_names("reshard", ConvertOptions, options)
    _refuse_idle("a directory", {"revision": options.get("revision"), "stream": options.get("stream") or None})
    to, final = options.get("to"), located(destination)
    with phase(options.get("progress"), "opening"), watched() as opened:
        checkpoint = open_checkpoint(source_at(source), options.get("given"))
        if checkpoint.side is Side.HUGGING_FACE or to in targets(Side.HUGGING_FACE):
            raise ConvertError("only Megatron checkpoints have a layout", hint="to or from Hugging Face: `convert`")
        _check_free(final, options)
        model = model_of(checkpoint, **part_of(FamilyOptions, options))
    if to is None:
        options["to"] = checkpoint.format if checkpoint.format in targets() else default_target(Side.MEGATRON)
    return _convert(model, final, options, opened)


def _check_free(final: Path, options: ConvertOptions) -> None:
    check_free(final, overwrite=options.get("overwrite", False) or options.get("dry_run", False))


def _convert(model: Model, final: Path, options: ConvertOptions, opened: Mapping[Path, Stamp]) -> Conversion:
    """Convert an open checkpoint; `opened` has its files with their stamps at that time."""
    for_megatron, dry_run = options.get("for_megatron"), options.get("dry_run", False)
    progress = options.get("progress")
    from_hf = model.checkpoint.side is Side.HUGGING_FACE
    chosen = target_named(options.get("to") or default_target(Side.MEGATRON if from_hf else Side.HUGGING_FACE))
    own = {name: options.get(name) for name in ("max_shard_size", "implementation")}
    options_for(chosen, own)
    layout = Layout(**part_of(LayoutOptions, options))
    if chosen.side is Side.HUGGING_FACE:
        idle = {name: options.get(name) for name in ("iteration", "tokenizer", "for_megatron")}
        _refuse_idle("a Hugging Face target", {**idle, **_changed(layout)})
    if from_hf:
        idle = {"vocab_size": options.get("vocab_size"), "arg": options.get("given") or None}
        if model.checkpoint.original_config is not None:
            idle = {"hf_config": options.get("hf_config"), **idle}
        _refuse_idle("a Hugging Face source", idle)
    strict, checksums = options.get("strict", False), options.get("checksums", True)
    if strict and not checksums:
        raise ConvertError("--strict looks at values while checksums are taken", hint="leave out --no-checksums")
    target = Target(
        final,
        chosen.name,
        layout,
        options.get("iteration"),
        tokenizer=options.get("tokenizer"),
        optimizer=options.get("optimizer", True),
        allow_drift=options.get("allow_drift", False),
        options=own,
        release=None if for_megatron is None else releases.parse(for_megatron),
        reading=reading_of(options),
    )
    with phase(progress, "planning"), watched() as planned:
        plan = plan_conversion(model, target)
    plan = dataclasses.replace(plan, stamps={**planned, **plan.stamps, **opened})
    if not dry_run:
        notes = execute(
            plan,
            overwrite=options.get("overwrite", False),
            progress=progress,
            strict=strict,
            checksums=checksums,
            resume=options.get("resume", False),
            workers=options.get("workers"),
        )
        plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
    return Conversion(plan, dry_run)


@file_errors()
def verify(
    a: PathLike,
    b: PathLike,
    *,
    logits: bool = False,
    tolerance: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[ModelOptions],
) -> Verification:
    """Compare two checkpoints, in any two formats, bit for bit; optionally also their logits.

    Args:
        logits: run both in fp32 on the CPU, Hugging Face through transformers and Megatron through its `GPTModel`.
        tolerance: allowed difference of logits, as a share of the largest one; 2e-5 unless given.
        options: facts that the checkpoints do not state, as listed in `mcore_convert.options.ModelOptions`.

    Raises:
        ConvertError: one of them cannot be read, or they are models of different sizes.
        TypeError: an option does not exist.
    """
    check_names("verify", ModelOptions, options)
    paths = [local_path(str(source)) for source in (a, b)]
    remote = [path for path in paths if isinstance(path, RemotePath)]
    if logits and remote:
        hint = "leave out --logits, or copy it to a directory on this machine"
        raise ConvertError(f"`{remote[0]}` is in a remote store, where no model is run from", hint=hint)
    with phase(progress, "opening"):
        first, second = in_one_family(*(identify(path, **options) for path in paths))
    allowed = TOLERANCE if tolerance is None else tolerance
    return compare(first, second, tolerance=allowed if logits else None, progress=progress)


@file_errors()
def verify_files(path: PathLike, *, progress: Progress | None = None) -> Integrity:
    """Check every byte of a checkpoint that this package wrote against the manifest beside it.

    Args:
        path: the directory, or that of a run, for its newest checkpoint.

    Raises:
        UnreadableCheckpoint: there is no manifest, or it or a file cannot be read.
    """
    return check_integrity(source_at(path), progress)


def _refuse_idle(what: str, options: Mapping[str, Any]) -> None:
    """Refuse options without effect: a user who gives one expects an effect."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise ConvertError(f"{what} has no use for {', '.join(given)}", hint="leave it out")


def _changed(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout that differ from those of a single rank."""
    return {name: value for name, value in vars(layout).items() if value != getattr(Layout(), name)}


__all__ = ["Conversion", "convert", "diff", "inspect", "reshard", "verify", "verify_files"]
