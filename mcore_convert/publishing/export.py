"""One export: a checkpoint as a complete, proven Hugging Face directory, with all that a user of the model needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.checkpoints.checksums import check_sums
from mcore_convert.checkpoints.identify import Model, identify, model_of
from mcore_convert.checkpoints.runs import PICTURE, History, Run, find_run, history_of, run_around
from mcore_convert.conversion.execute import execute
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.prepare import plan_conversion
from mcore_convert.conversion.target import Target, reading_of
from mcore_convert.errors import ConfigError, ConvertError, UnwritableTarget
from mcore_convert.formats.base import Side
from mcore_convert.formats.files import safetensors
from mcore_convert.formats.files.json_file import json_bytes
from mcore_convert.formats.files.model_folder import CARD, CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, carried_files
from mcore_convert.formats.megatron.run_directory import iteration_of
from mcore_convert.formats.registry import default_target, directory_of
from mcore_convert.options import FamilyOptions, ModelFolderOptions, part_of
from mcore_convert.publishing import companions
from mcore_convert.publishing.card import Card, render
from mcore_convert.publishing.hf_tensors import HfTensor, hf_tensors
from mcore_convert.publishing.readback import read_back
from mcore_convert.publishing.tokenizer import Tokenizer
from mcore_convert.spec.config.arguments import DTYPES
from mcore_convert.storage.phases import Part, phase
from mcore_convert.storage.progress import Meter, Progress
from mcore_convert.storage.sources import watched


@dataclass(frozen=True)
class Prepared:
    """Export that is planned and proven complete. Nothing has been written."""

    plan: Plan
    tensors: tuple[HfTensor, ...]
    card: Card
    tokenizer: Tokenizer | None
    strict: bool = False

    @property
    def path(self) -> Path:
        """Directory to create."""
        return self.plan.reservation.path

    @property
    def files(self) -> dict[str, int]:
        """Size of every file except the card, whose text is not known yet."""
        reservation = self.plan.reservation
        sizes = {
            **reservation.sizes,
            **{target: source.stat().st_size for target, source in reservation.carried.items()},
            **{target: len(text) for target, text in reservation.texts.items()},
        }
        return {str(path.relative_to(self.path)): size for path, size in sizes.items()}


def prepare(
    source: Path,
    destination: Path | None,
    options: ModelFolderOptions,
    *,
    repo: str | None = None,
    revision: str | None = None,
) -> Prepared:
    """Plan an export completely.

    Args:
        source: a checkpoint, or the directory of a run, for its newest checkpoint.
        destination: the directory to create; `default_destination` unless given.
        repo: its repository on the Hub; `revision` is the branch there.

    Raises:
        ConvertError: the source cannot be exported, or there is no tokenizer that fits it.
    """
    dtype = options.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"there is no dtype `{dtype}` of weights", hint=f"known are {', '.join(DTYPES)}")
    with watched() as opened:
        prepared = _prepare(source, destination, options, repo, revision)
    plan = prepared.plan
    return dataclasses.replace(prepared, plan=dataclasses.replace(plan, stamps={**plan.stamps, **opened}))


def _prepare(
    source: Path, destination: Path | None, options: ModelFolderOptions, repo: str | None, revision: str | None
) -> Prepared:
    dtype, metadata = options.get("dtype"), options.get("metadata") or {}
    reading = part_of(FamilyOptions, options)
    model = identify(source, given=options.get("given"), **reading)
    source = directory_of(source)
    run = find_run(source) or run_around(source)
    if model.checkpoint.side is Side.HUGGING_FACE:
        _refuse_idle(model, options)
    history = history_of(model.checkpoint.common)
    notes: list[str] = []
    tokenizer = None
    if options.get("with_tokenizer", True):
        tokenizer = companions.tokenizer_of(model, history, options.get("tokenizer"))
        if not model.vocab_is_stated and companions.is_the_vocabulary(tokenizer, model):
            notes.append(f"the vocabulary is the tokenizer's: {tokenizer.size} tokens")
            reading["vocab_size"] = tokenizer.size
            model = model_of(model.checkpoint, **reading)
        companions.check_fit(tokenizer, model, notes)
    final = destination or default_destination(source, model.checkpoint.path, run)
    target = Target(
        final,
        default_target(Side.HUGGING_FACE),
        options={name: options.get(name) for name in ("max_shard_size", "quantize")},
        tokenizer=tokenizer.place if tokenizer else None,
        allow_drift=options.get("allow_drift", False),
        dtype=dtype,
        from_master=options.get("from_master", False),
        reading=reading_of(options),
    )
    plan = plan_conversion(model, target)
    config = _complete(plan, model, tokenizer, run, replace=options.get("tokenizer") is not None)
    dtypes = tuple(sorted(set(plan.sources.dtype_of.values())))
    card = Card(
        model=model,
        run=run,
        history=history,
        config=config,
        dtypes=dtypes,
        dtype=dtype or " and ".join(dtypes),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        title=_title(repo, run, history, final),
        repo=repo,
        revision=revision,
        metadata=metadata,
        quantised=plan.target.quantised,
    )
    plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
    strict = options.get("strict", False)
    return Prepared(plan, tuple(hf_tensors(model.family, model.dims, plan.sources)), card, tokenizer, strict)


class Written(NamedTuple):
    """Checksum of the weights as the source stores them, and notes to the user about the values.

    Only the first of several processes has a checksum.
    """

    checksum: str | None
    notes: tuple[str, ...]


def write(
    prepared: Prepared,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    resume: bool = False,
    workers: int | None = None,
) -> Written:
    """Write an export, and prove every bit of it.

    The directory appears when it is complete and proven, or not at all. Of processes that share the export, the first
    one proves it.

    Raises:
        ConvertError: as `execute`; or the written tensors differ from the source.
    """
    plan = prepared.plan
    written = plan.target
    nbytes = sum(tensor.meta.nbytes for tensor in prepared.tensors)
    total = plan.nbytes + nbytes
    checksums: list[str] = []

    def proven(partial: Path) -> Mapping[Path, bytes]:
        files = dict.fromkeys(partial / view.path.name for view in written.whole_views.values())
        views = {name: view for file in files for name, view in safetensors.read(file).items()}
        coded = written.coded_views.items()
        views |= {name: view.moved(lambda path: partial / path.name) for name, view in coded}
        reading = None if progress is None else Part(progress, plan.nbytes, total)
        with phase(progress, "reading again", nbytes):
            checksums.append(read_back(prepared.tensors, views, Meter(nbytes, reading)))
        return {prepared.path / CARD: render(prepared.card, checksums[0])}

    check_sums(plan.source)
    copied = None if progress is None else Part(progress, 0, total)
    notes = execute(
        plan,
        overwrite=overwrite,
        progress=copied,
        conclude=proven,
        strict=prepared.strict,
        resume=resume,
        workers=workers,
    )
    return Written(checksums[0] if checksums else None, notes)


def default_destination(source: Path, checkpoint: Path, run: Run | None) -> Path:
    """Return the default directory of an export: `RUN/hf/iter_*`, or `SOURCE-hf` beside a source that is not of a run.

    Raises:
        UnwritableTarget: the source is the root of a file system.
    """
    if run is not None and iteration_of(checkpoint) is not None:
        return run.path / "hf" / checkpoint.name
    place = source if source.name not in ("", "..") else source.resolve()
    if not place.name:
        raise UnwritableTarget(f"there is no place beside `{source}`", hint="name a destination")
    return place.with_name(f"{place.stem if place.is_file() else place.name}-hf")


def _refuse_idle(model: Model, options: ModelFolderOptions) -> None:
    """Refuse options that only a Megatron checkpoint, or one without a configuration of its own, can use."""
    of_megatron = {
        "--hf-config": options.get("hf_config") if model.checkpoint.original_config is not None else None,
        "--vocab-size": options.get("vocab_size"),
        "--arg": options.get("given"),
        "--from-master": options.get("from_master"),
    }
    idle = [name for name, value in of_megatron.items() if value]
    if idle:
        raise ConvertError(f"a Hugging Face source has no use for {', '.join(idle)}", hint="leave it out")


def _complete(
    plan: Plan, model: Model, tokenizer: Tokenizer | None, run: Run | None, *, replace: bool
) -> Mapping[str, Any]:
    """Add the tokenizer and other accompanying files to a plan; return the configuration that is written."""
    reservation = plan.reservation
    path = reservation.path
    config: dict[str, Any] = json.loads(reservation.texts[path / CONFIG])
    left = (CARD, GENERATION_CONFIG, *carried_files(model.folder, TOKENIZER_FILES)) if model.folder else ()
    for name in left:
        reservation.carried.pop(path / name, None)
    if tokenizer is not None:
        reservation.carried |= {path / name: file for name, file in tokenizer.files.items()}
        reservation.texts |= {path / name: text for name, text in tokenizer.texts.items()}
        config = companions.with_token_ids(config, tokenizer, replace=replace, pad=False)
        reservation.texts[path / CONFIG] = json_bytes(config)
    generation = companions.generation_config(model, config, tokenizer, replace=replace)
    if generation:
        reservation.texts[path / GENERATION_CONFIG] = json_bytes(generation)
    if run is not None and run.picture is not None:
        reservation.carried[path / PICTURE] = run.picture
    return config


def _title(repo: str | None, run: Run | None, history: History, final: Path) -> str:
    if repo is not None:
        return repo.rpartition("/")[2]
    if run is not None and history.iteration is not None:
        return f"{run.name}, iteration {history.iteration:,}"
    return final.absolute().name
