"""Identification of a checkpoint: its format, its family, its sizes and its configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Unpack

from mcore_convert.checkpoints import families
from mcore_convert.checkpoints.families import Choice
from mcore_convert.checkpoints.manifest import check_manifest
from mcore_convert.checkpoints.runs import find_run
from mcore_convert.errors import ConfigError, UnreadableCheckpoint
from mcore_convert.formats.base import Checkpoint, Side
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.model_folder import CONFIG
from mcore_convert.formats.megatron.run_directory import TRACKER, iterations, resolve
from mcore_convert.formats.registry import broken, directory_of, format_of
from mcore_convert.options import FamilyOptions, ModelOptions
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.config.mapping import shown
from mcore_convert.spec.config.recorded import agreed
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family
from mcore_convert.spec.names import spell
from mcore_convert.storage.collection import without_collection
from mcore_convert.storage.paths import absent
from mcore_convert.storage.remote import located

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """Checkpoint together with the model that it holds.

    `args` are normalised Megatron arguments of the architecture; `config` is the original `config.json` where one is
    known: that of the directory, the one supplied, or the one carried along from the original checkpoint.
    `folder` holds its tokenizer and similar files. `vocab_is_stated` is false where nothing states which rows of the
    embedding are padding, so that all of them count as vocabulary.
    Where no family represents a Megatron model, `family` is `gpt`, which has no Hugging Face form, and `refusal` gives
    the reason. `choice` records how the family of a Megatron model was chosen. `ignored` are the unknown keys of its
    `config.json` that the user declared to be without effect, with their values.
    """

    checkpoint: Checkpoint
    family: Family
    dims: Dims
    args: Mapping[str, Any]
    config: Mapping[str, Any] | None
    notes: tuple[str, ...] = field(default=())
    refusal: ConfigError | None = None
    folder: Path | None = None
    vocab_is_stated: bool = True
    choice: Choice | None = None
    ignored: tuple[str, ...] = ()

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons why no family represents it, one line each."""
        return _lines_of(self.refusal)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, without padding; a tied head and the copies of a weight are not counted again."""
        instances = (weight for weight, _ in self.family.instances(self.dims) if weight.copy_of is None)
        return sum(prod(self.family.shape(weight, self.dims)) for weight in instances)


@dataclass(frozen=True)
class Opened:
    """Readable checkpoint. Where its model is unknown, `model` is None and `error` gives the reason."""

    checkpoint: Checkpoint
    model: Model | None
    error: ConfigError | None = None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons why no family represents it, one line each."""
        return _lines_of(self.error) if self.model is None else self.model.refusals


def _lines_of(error: ConfigError | None) -> tuple[str, ...]:
    return () if error is None else (error.message, *error.items)


def open_any(path: Path, **options: Unpack[ModelOptions]) -> Opened:
    """Open a checkpoint whether or not its model is known.

    Raises:
        ConvertError: it cannot be read, or its arguments are contradictory.
    """
    checkpoint = open_checkpoint(path)
    try:
        return Opened(checkpoint, model_of(checkpoint, **options))
    except ConfigError as error:
        return Opened(checkpoint, None, error)


@without_collection()
def open_checkpoint(path: Path, given: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a directory in any known format, reading headers only; of a training run, its newest checkpoint.

    A path to one of its files opens the checkpoint too, and so does the folder of one rank.

    Args:
        given: Megatron arguments, for a checkpoint that stores none.

    Raises:
        UnreadableCheckpoint: it is missing, in no known format, or damaged.
    """
    checkpoint = _opened(path, given)
    logger.info("opened `%s`: %s, %d tensors", checkpoint.path, checkpoint.format, len(checkpoint.tensors))
    return checkpoint


def _opened(path: Path, given: Mapping[str, Any] | None) -> Checkpoint:
    if not path.exists():
        raise absent(path)
    path = directory_of(path)
    kind = format_of(path)
    if kind is not None:
        opened = kind.open(path, given or {})
        check_manifest(opened)
        return opened
    if not path.is_dir():
        hint = "name the directory that holds the checkpoint"
        raise UnreadableCheckpoint(f"`{path}` is not a directory, and no file of a checkpoint", hint=hint)
    saved = iterations(path)
    if (path / TRACKER).is_file() or saved:
        names = dict.fromkeys(each.file_names for each in map(format_of, saved) if each is not None)
        return _opened(resolve(path, format_of, " or ".join(names) or "checkpoint"), given)
    run = find_run(path)
    if run is not None and run.checkpoints != path:
        return _opened(run.checkpoints, given)
    if (path / CONFIG).is_file():
        raise UnreadableCheckpoint(f"`{path}` has a `{CONFIG}` but no weights")
    raise UnreadableCheckpoint(
        f"`{path}` is no checkpoint in a known format",
        items=broken().values(),
        hint="a Hugging Face directory has model.safetensors, a Megatron one .metadata or a tracker file",
    )


def identify(path: Path, *, given: Mapping[str, Any] | None = None, **options: Unpack[FamilyOptions]) -> Model:
    """Open a checkpoint and identify its model.

    Args:
        given: Megatron arguments that the checkpoint does not store.
        options: facts that the checkpoint does not state itself.

    Raises:
        ConvertError: it cannot be read, no family represents it, or its arguments are contradictory.
    """
    return model_of(open_checkpoint(path, given), **options)


def model_of(checkpoint: Checkpoint, **options: Unpack[FamilyOptions]) -> Model:
    """Identify the model of an open checkpoint.

    Raises:
        ConvertError: no family represents it, or its arguments are contradictory.
    """
    family, ignore_keys = options.get("family"), options.get("ignore_keys", ())
    given_config = options.get("hf_config")
    hf_config = None if given_config is None else located(given_config)
    if checkpoint.undecoded:
        raise ConfigError(
            f"the weights in `{checkpoint.path}` are quantised in a way that is not known",
            items=checkpoint.undecoded,
            hint="convert the model that it was made from",
        )
    if checkpoint.original_config is not None:
        return _identify_by_config(checkpoint, checkpoint.original_config, family, ignore_keys)
    folder = checkpoint.companions
    config = _read_config(hf_config)
    if hf_config is not None and hf_config.is_dir():
        folder = hf_config
    if checkpoint.side is Side.HUGGING_FACE:
        if config is None:
            raise ConfigError(
                f"`{checkpoint.path}` has no `{CONFIG}`, so its architecture is not known",
                hint="pass the model's configuration: --hf-config PATH",
            )
        return replace(_identify_by_config(checkpoint, config, family, ignore_keys), folder=folder)
    if config is None and folder is not None and (folder / CONFIG).is_file():
        config = read_json(folder / CONFIG)
    if config is not None:  # it describes the original files, not these weights
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    model = _identify_megatron(checkpoint, family, config, options.get("vocab_size"), ignore_keys)
    return replace(model, folder=folder)


def _read_config(path: Path | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    return read_json(path / CONFIG if path.is_dir() else path)


def in_one_family(a: Model, b: Model) -> tuple[Model, Model]:
    """Reassign a Megatron model to the family of the model that it is compared with, if it fits that as well."""
    if a.choice is not None and b.family in a.choice.others:
        return replace(a, family=b.family, choice=None), b
    if b.choice is not None and a.family in b.choice.others:
        return a, replace(b, family=a.family, choice=None)
    return a, b


def _ignoring(
    family: Family, config: Mapping[str, Any] | None, keys: Sequence[str]
) -> tuple[Family, tuple[str, ...], list[str]]:
    """Return the family with further keys of `config.json` ignored, those of the keys that are present,
    and the notes about them.
    """
    if not keys:
        return family, (), []
    ignored = tuple(f"`{key}` = {shown(config[key])}" for key in keys if config is not None and key in config)
    notes = [f"config.json: {line} is taken to change nothing, as --ignore-key says" for line in ignored]
    return replace(family, config=family.config.ignoring(keys)), ignored, notes


def _identify_by_config(
    checkpoint: Checkpoint, config: Mapping[str, Any], name: str | None, ignore_keys: Sequence[str]
) -> Model:
    family = families.named(name) if name else families.of_config(config)
    family, ignored, notes = _ignoring(family, config, ignore_keys)
    args = arguments.normalise(family.config.to_megatron(config))
    vocab = args["vocab_size"]
    dims = Dims.of(args, vocab_size=vocab, padded_vocab_size=vocab)
    opened = checkpoint.named_for(family)
    if dims.mtp_num_layers and not _predicts(opened, family, dims):
        stated = [
            f"`{key}` = {shown(config[key])}" for key in family.config.keys_of("mtp_num_layers") if config.get(key)
        ]
        if stated:
            notes.append(f"config.json says {stated[0]}, but no file has such layers: converted without them")
        args = {**args, "mtp_num_layers": None}
        dims = replace(dims, mtp_num_layers=0)
    return Model(opened, family, dims, args, config, tuple(notes), folder=opened.companions, ignored=ignored)


def _predicts(checkpoint: Checkpoint, family: Family, dims: Dims) -> bool:
    """Return whether any tensor is of a layer that predicts further tokens; transformers saves models without them."""
    rows = ((weight, at) for weight, at in family.instances(dims) if weight.predicts)
    names = (spell(name, at) for weight, at in rows for spelling in weight.spellings for name in spelling.hf)
    return any(name in checkpoint.tensors for name in names)


def _identify_megatron(
    checkpoint: Checkpoint,
    name: str | None,
    config: Mapping[str, Any] | None,
    vocab_size: int | None,
    ignore_keys: Sequence[str],
) -> Model:
    stored = checkpoint.common.args
    refusal: ConfigError | None = None
    choice: Choice | None = None
    if stored is None:
        recorded = checkpoint.common.recorded
        if config is None:
            without = "" if recorded is None else f", and `{recorded.file}` does not name its activation"
            raise ConfigError(
                f"`{checkpoint.path}` stores no arguments, so its architecture is not known{without}",
                hint="pass the model's configuration: --hf-config PATH",
            )
        family = families.named(name) if name else families.of_config(config)
        family, ignored, notes = _ignoring(family, config, ignore_keys)
        architecture = family.config.to_megatron(config)
        if recorded is None:
            notes.append(
                "the checkpoint stores no arguments: its architecture is taken from the Hugging Face configuration"
            )
        else:
            architecture = agreed(architecture, recorded)
        args = arguments.normalise(architecture)
        checkpoint = checkpoint.described_by(args)
    else:
        args = arguments.normalise(stored)
        try:
            choice = Choice(families.named(name)) if name else families.choose(args, config)
            family = choice.family
        except ConfigError as error:
            if name:
                raise
            refusal = error
            family = gpt.family(args)
        family, ignored, notes = _ignoring(family, config, ignore_keys)
    rows = checkpoint.embedding_rows
    if rows is None:
        raise UnreadableCheckpoint(f"`{checkpoint.path}` has no `{gpt.EMBEDDING}`")
    stated = vocab = vocab_size or args.get("vocab_size") or (config or {}).get("vocab_size")
    if vocab is None:
        vocab = rows
        notes.append(
            f"the checkpoint does not say its true vocabulary: all {rows} rows of the embedding are kept, "
            "padding included; pass --vocab-size to cut it"
        )
    if not isinstance(vocab, int):
        raise ConfigError(f"`vocab_size` = {vocab!r} is not a number of rows")
    if vocab > rows:
        raise ConfigError(f"a vocabulary of {vocab} does not fit an embedding of {rows} rows")
    args = {**args, "vocab_size": vocab}
    return Model(
        checkpoint,
        family,
        Dims.of(args, vocab_size=vocab, padded_vocab_size=rows),
        args,
        config,
        (*notes, *families.remarks(args)),
        refusal,
        vocab_is_stated=stated is not None,
        choice=choice,
        ignored=ignored,
    )
