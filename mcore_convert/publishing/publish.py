"""The public functions that publish a model: `export` to a complete Hugging Face directory, and `push` to the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.ranks import current
from mcore_convert.errors import ConvertError, HubError
from mcore_convert.formats.base import Side
from mcore_convert.formats.registry import directory_of, format_of
from mcore_convert.options import (
    ExportOptions,
    HubOptions,
    ModelFolderOptions,
    PathLike,
    RunOptions,
    check_names,
    part_of,
)
from mcore_convert.publishing.export import Prepared, prepare, write
from mcore_convert.publishing.tokenizer import Tokenizer
from mcore_convert.publishing.upload import MAIN, Destination, Upload, checked, upload
from mcore_convert.storage.destination import check_free
from mcore_convert.storage.paths import absent, files_in
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Progress
from mcore_convert.storage.remote import RemotePath, located
from mcore_convert.storage.sending import source_at
from mcore_convert.storage.views import file_errors


@dataclass(frozen=True)
class Export:
    """Result of an export, or of its plan (`dry_run`). Sizes in bytes.

    `path` is the directory; None if it was temporary, for the Hub only. `files` are its files by
    name; a planned export lacks the card. `checksum` is that of the weights as the source stores them.
    """

    plan: Plan
    tokenizer: Tokenizer | None
    path: Path | None
    files: Mapping[str, int]
    checksum: str | None
    upload: Upload | None
    dry_run: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user: what was cut, left behind or rounded."""
        return self.plan.notes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plan, tokenizer = self.plan, self.tokenizer
        dtypes = {meta.dtype for meta in plan.target.headers.values()}
        return {
            "source": {"path": str(plan.source.path), "format": plan.source.format},
            "path": None if self.path is None else str(self.path),
            "files": dict(self.files),
            "family": plan.family.name,
            "num_parameters": plan.num_parameters,
            "num_tensors": len(plan.target.tensors),
            "dtypes": sorted(dtypes),
            "tokenizer": None if tokenizer is None else {"place": tokenizer.place, "size": tokenizer.size},
            "checksum": self.checksum,
            "upload": None if self.upload is None else self.upload.as_dict(),
            "dry_run": self.dry_run,
            "notes": list(self.notes),
        }


@file_errors()
def export(source: PathLike, destination: PathLike | None = None, **options: Unpack[ExportOptions]) -> Export:
    """Export a checkpoint to a complete Hugging Face directory: weights, configuration, tokenizer and model card.

    The written tensors are read again and compared with the source, bit for bit, before the directory appears.

    Args:
        source: a checkpoint in any format, or the directory of a training run, for its newest checkpoint.
        destination: the directory to create. If not given it is `RUN/hf/iter_*` for an iteration of a run, else
            `SOURCE-hf`; with `push_to_hub` it is temporary.
        options: the content and the destination on the Hub, as listed in `mcore_convert.options.ExportOptions`.

    Raises:
        ConvertError: the export is refused; nothing is left behind. See `mcore_convert.errors` for the kinds.
        TypeError: an option does not exist.
    """
    check_names("export", ExportOptions, options)
    repo, on_hub = options.get("push_to_hub"), part_of(HubOptions, options)
    target = None
    if repo is not None:
        target = checked(_destination(repo, on_hub), writable=not options.get("dry_run", False))
    elif _destination("", on_hub) != Destination(""):
        raise ConvertError("--private, --branch, --tag and --commit-message are for the Hub", hint="pass --push-to-hub")
    place = None if destination is None else located(destination)
    run, bars = part_of(RunOptions, options), options.get("bars", False)
    return hand_over(source_at(source), place, part_of(ModelFolderOptions, options), target, bars=bars, **run)


def _destination(repo: str, options: HubOptions) -> Destination:
    branch, message = options.get("branch", MAIN), options.get("commit_message")
    return Destination(repo, options.get("private", False), branch, options.get("tag"), message)


def hand_over(
    source: Path,
    destination: Path | None,
    options: ModelFolderOptions,
    target: Destination | None,
    *,
    bars: bool = False,
    **run: Unpack[RunOptions],
) -> Export:
    """Export to a directory, and to a destination on the Hub, already checked, if one is given."""
    progress, overwrite = run.get("progress"), run.get("overwrite", False)
    if destination is None and target is not None:
        if run.get("resume", False) or current().size > 1:
            raise ConvertError("a temporary directory cannot be resumed or shared", hint="name a destination")
        with tempfile.TemporaryDirectory(prefix="mcore-convert-") as folder:
            prepared = _prepared(source, _in(folder, source), options, target, progress)
            return _run(prepared, target, {**run, "overwrite": False}, bars=bars, kept=False)
    prepared = _prepared(source, destination, options, target, progress)
    check_free(prepared.path, overwrite=overwrite or run.get("dry_run", False))
    return _run(prepared, target, run, bars=bars, kept=True)


def _in(folder: str, source: Path) -> Path:
    """Return a path within a temporary directory, with the name of the source."""
    return Path(folder, source.absolute().name or "model")


def _prepared(
    source: Path,
    destination: Path | None,
    options: ModelFolderOptions,
    target: Destination | None,
    progress: Progress | None,
) -> Prepared:
    with phase(progress, "planning"):
        if target is None:
            return prepare(source, destination, options)
        revision = None if target.branch == MAIN else target.branch
        return prepare(source, destination, options, repo=target.repo, revision=revision)


def _run(prepared: Prepared, target: Destination | None, run: RunOptions, *, bars: bool, kept: bool) -> Export:
    path, progress = prepared.path if kept else None, run.get("progress")
    if run.get("dry_run", False):
        return Export(prepared.plan, prepared.tokenizer, path, prepared.files, None, None, True)
    checksum, notes = write(
        prepared,
        overwrite=run.get("overwrite", False),
        progress=progress,
        resume=run.get("resume", False),
        workers=run.get("workers"),
    )
    plan = replace(prepared.plan, notes=(*prepared.plan.notes, *notes))
    files = {name: file.stat().st_size for name, file in files_in(prepared.path).items()}
    sent = None
    if target is not None and current().is_first:
        try:
            sent = upload(prepared.path, target, progress=progress, bars=bars)
        except HubError as error:
            if kept:
                hint = f"the export is in `{path}`: go on with `mcore-convert push {path} {target.repo}`"
                raise HubError(error.message, items=error.items, hint=f"{error.hint}; {hint}") from error
            raise
    return Export(plan, prepared.tokenizer, path, files, checksum, sent, False)


@file_errors()
def push(
    source: PathLike,
    repo: str,
    *,
    ignore_keys: Sequence[str] = (),
    dry_run: bool = False,
    progress: Progress | None = None,
    bars: bool = False,
    **options: Unpack[HubOptions],
) -> Upload:
    """Send a model to the Hub, in one commit. Files that the Hub has already are not sent again.

    Args:
        source: a Hugging Face directory. Any other checkpoint is exported to a temporary directory first, as `export`
            does with its defaults.
        repo: `OWNER/NAME`, or `NAME` for the holder of the token; created if missing.
        ignore_keys: as for `export`.
        dry_run: report what would be sent, and send nothing.
        progress: as for `export`, if an export is made.
        bars: let the Hub's client show its own progress on stderr.
        options: the branch and the commit, as listed in `mcore_convert.options.HubOptions`.

    Raises:
        HubError: the Hub refuses, or cannot be reached; the same call continues where this one ended.
        ConvertError: the source is not a complete model, or cannot be exported.
        TypeError: an option does not exist.
    """
    check_names("push", HubOptions, options)
    path, target = directory_of(source_at(source)), _destination(repo, options)
    if path.is_dir() and _is_hugging_face(path):
        if isinstance(path, RemotePath):
            hint = "copy it to a directory on this machine, and push that"
            raise ConvertError(f"`{path}` cannot be sent from one store to another", hint=hint)
        open_checkpoint(path)  # proves it complete, from headers and the index
        return upload(path, target, dry_run=dry_run, progress=progress, bars=bars)
    if not path.exists():
        raise absent(path)
    target = checked(target, writable=not dry_run)
    with tempfile.TemporaryDirectory(prefix="mcore-convert-") as folder:
        prepared = _prepared(path, _in(folder, path), {"ignore_keys": ignore_keys}, target, progress)
        write(prepared, progress=progress)
        return upload(prepared.path, target, dry_run=dry_run, progress=progress, bars=bars)


__all__ = ["Export", "export", "push"]


def _is_hugging_face(path: Path) -> bool:
    """Return whether a directory is in a Hugging Face format, and needs no export."""
    kind = format_of(path)
    return kind is not None and kind.side is Side.HUGGING_FACE
