"""The public functions, as the command line offers them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.download import local_path
from mcore_convert.checkpoints.identify import identify, in_one_family, open_checkpoint
from mcore_convert.comparison.equality import Verification, compare
from mcore_convert.conversion.execute import execute, expected_memory
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.prepare import plan_conversion
from mcore_convert.conversion.target import COMMAND_FILE, Target
from mcore_convert.errors import ConvertError
from mcore_convert.formats.base import Side
from mcore_convert.formats.registry import default_target, options_for, target_named, targets
from mcore_convert.inspection.report import diff, inspect
from mcore_convert.spec import releases
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.destination import check_free
from mcore_convert.storage.elements import Progress
from mcore_convert.storage.phases import phase
from mcore_convert.storage.sources import watched
from mcore_convert.storage.views import file_errors

PathLike = str | Path


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, or would do (`dry_run`). Sizes in bytes."""

    plan: Plan
    dry_run: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: what was cut, padded, left behind or changed."""
        return self.plan.notes

    @property
    def command(self) -> str | None:
        """The Megatron-LM command line of the model; None where the target is not Megatron's."""
        for path, content in self.plan.reservation.texts.items():
            if path.name == COMMAND_FILE:
                return os.fsdecode(content).strip()
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
def convert(
    source: PathLike,
    destination: PathLike,
    *,
    to: str | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    pipeline_layout: str | None = None,
    optimizer: bool = True,
    allow_drift: bool = False,
    implementation: str | None = None,
    for_megatron: str | None = None,
    iteration: int | None = None,
    family: str | None = None,
    hf_config: PathLike | None = None,
    ignore_keys: Sequence[str] = (),
    vocab_size: int | None = None,
    given: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    max_shard_size: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint into another format.

    Args:
        source: a Hugging Face or Megatron directory, or a Hub id.
        destination: the directory to make. It appears when it is complete; until then it is `destination.partial`.
        to: `hf`, `torch_dist` or `torch`; between Hugging Face and `torch_dist` the other one unless given.
        tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers, pipeline_layout: the layout of a Megatron target,
            as `Layout` describes it. `torch` has a file for each of its ranks; `torch_dist` can be loaded at any
            layout, which only decides its chunks, the vocabulary padding and the stored arguments.
        optimizer: carry optimizer state from Megatron to Megatron.
        allow_drift: take the first rank's copy of a weight that ranks of an old run hold with small differences.
        implementation: `local` or `transformer_engine`, the layer spec of the run that will load a Megatron target;
            `torch` has its names.
        for_megatron: version of Megatron-LM that will load a Megatron target (`0.12`, `0.16.1`), which decides the form
            of optimizer state; that which wrote the source where it can be told, else the newest.
        iteration: number of the `iter_*` directory. Without one, weights alone become a `release`, and weights with
            optimizer state keep the number that they have.
        family: take this family instead of finding it.
        hf_config: original `config.json` (or its directory): kept, but for what the checkpoint proves different.
        ignore_keys: unknown keys of `config.json` that change nothing of what the model computes.
        vocab_size: true vocabulary of a Megatron checkpoint that does not store it.
        given: Megatron arguments that an old checkpoint does not store.
        tokenizer: what `--tokenizer-model` shall name in the stored arguments; the carried files unless given.
        max_shard_size: largest safetensors file, in bytes; 5 GB unless given.
        revision: branch, tag or commit of a Hub id.
        overwrite: replace a destination that exists.
        dry_run: plan and prove, write nothing.
        progress: called with the bytes copied so far and their total, by one thread at a time. Where it has a method
            `phase`, that is called with the name of what is done next (`planning`, `copying`), and None after it.

    Raises:
        ConvertError: the conversion is refused; nothing is left behind. See `mcore_convert.errors` for the kinds.
    """
    final = Path(destination)
    check_free(final, overwrite=overwrite or dry_run)
    path = local_path(str(source), revision)
    with phase(progress, "opening"), watched() as opened:
        model = identify(
            path,
            family=family,
            hf_config=_path(hf_config),
            vocab_size=vocab_size,
            given=given,
            ignore_keys=ignore_keys,
        )
    source_side = model.checkpoint.side
    other = Side.MEGATRON if source_side is Side.HUGGING_FACE else Side.HUGGING_FACE
    chosen = target_named(to or default_target(other))
    own = {"max_shard_size": max_shard_size, "implementation": implementation}
    options_for(chosen, own)
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        etp=etp,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        pipeline_layout=pipeline_layout,
    )
    if chosen.side is Side.HUGGING_FACE:
        idle = {"iteration": iteration, "tokenizer": tokenizer, "for_megatron": for_megatron}
        _refuse_idle("a Hugging Face target", {**idle, **_changed(layout)})
    if source_side is Side.HUGGING_FACE:
        _refuse_idle("a Hugging Face source", {"hf_config": hf_config, "vocab_size": vocab_size, "arg": given or None})
    if Path(source).exists():
        _refuse_idle("a directory", {"revision": revision})
    target = Target(
        final,
        chosen.name,
        layout,
        iteration,
        tokenizer=tokenizer,
        optimizer=optimizer,
        allow_drift=allow_drift,
        options=own,
        release=None if for_megatron is None else releases.parse(for_megatron),
    )
    with phase(progress, "planning"), watched() as planned:
        plan = plan_conversion(model, target)
    plan = dataclasses.replace(plan, stamps={**planned, **plan.stamps, **opened})
    if not dry_run:
        execute(plan, overwrite=overwrite, progress=progress)
    return Conversion(plan, dry_run)


def reshard(source: PathLike, destination: PathLike, *, to: str | None = None, **options: Any) -> Conversion:
    """Bring a Megatron checkpoint to another layout, its optimizer state with it.

    Args:
        source: a Megatron directory.
        destination: the directory to make.
        to: `torch_dist` or `torch`; the format of the source unless given, and `torch_dist` for zarr.
        options: as for `convert`.

    Raises:
        ConvertError: as `convert`; or the source is not Megatron's.
    """
    with file_errors():
        opened = open_checkpoint(Path(source), options.get("given"))
    if opened.side is Side.HUGGING_FACE or to in targets(Side.HUGGING_FACE):
        raise ConvertError("only Megatron checkpoints have a layout", hint="to or from Hugging Face: `convert`")
    return convert(
        source,
        destination,
        to=to or (opened.format if opened.format in targets() else default_target(Side.MEGATRON)),
        **options,
    )


@file_errors()
def verify(
    a: PathLike,
    b: PathLike,
    *,
    logits: bool = False,
    tolerance: float | None = None,
    hf_config: PathLike | None = None,
    ignore_keys: Sequence[str] = (),
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare two checkpoints, in any two formats, bit for bit; on request also the logits that they compute.

    Args:
        logits: run both in fp32 on the CPU, Hugging Face through transformers and Megatron through its `GPTModel`.
        tolerance: allowed difference of logits, as a share of the largest one; 2e-5 unless given.
        hf_config, ignore_keys, vocab_size: as for `convert`.

    Raises:
        ConvertError: one of them cannot be read, or they are models of different sizes.
    """
    config = _path(hf_config)
    paths = [local_path(str(source)) for source in (a, b)]
    with phase(progress, "opening"):
        first, second = in_one_family(
            *(identify(path, hf_config=config, vocab_size=vocab_size, ignore_keys=ignore_keys) for path in paths)
        )
    found = compare(first, second, progress=progress)
    if not logits:
        return found
    from mcore_convert.comparison.logits import TOLERANCE, compare_logits

    report = compare_logits(first, second, tolerance=TOLERANCE if tolerance is None else tolerance, progress=progress)
    return dataclasses.replace(found, logits=report)


def _refuse_idle(what: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would change nothing: a user who gives one expects something of it."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise ConvertError(f"{what} has no use for {', '.join(given)}", hint="leave it out")


def _changed(layout: Layout) -> dict[str, Any]:
    """The fields of a layout that are not what a single rank has."""
    return {name: value for name, value in vars(layout).items() if value != getattr(Layout(), name)}


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


__all__ = ["Conversion", "convert", "diff", "inspect", "reshard", "verify"]
