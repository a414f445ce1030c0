"""What a checkpoint holds: its format, its family, its sizes and its configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_convert import families
from mcore_convert.errors import ConfigError, UnreadableCheckpoint
from mcore_convert.formats import hf, mp_rank, torch_dist, zarr
from mcore_convert.formats.hf import HfCheckpoint
from mcore_convert.formats.mp_rank import MpRankCheckpoint
from mcore_convert.formats.torch_dist import TorchDistCheckpoint
from mcore_convert.paths import absent
from mcore_convert.runs import find_run
from mcore_convert.spec import arguments, gpt
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family
from mcore_convert.spec.shard import Box

logger = logging.getLogger(__name__)

MegatronCheckpoint = TorchDistCheckpoint | MpRankCheckpoint


@dataclass(frozen=True)
class Model:
    """A checkpoint and what it is a checkpoint of.

    `args` are normalised Megatron arguments of the architecture; `config` is the original `config.json` where one is
    known: that of the directory, the one supplied, or the one carried along since the checkpoint came from there.
    `folder` is where its tokenizer and the like are. `vocab_is_said` is false where all rows of the embedding are taken
    for the vocabulary, since nothing says which of them are padding.
    Where no family represents a Megatron model, `family` is `gpt`, which has no Hugging Face form, and `refusals` says
    why.
    """

    checkpoint: HfCheckpoint | MegatronCheckpoint
    family: Family
    dims: Dims
    args: Mapping[str, Any]
    config: Mapping[str, Any] | None
    notes: tuple[str, ...] = field(default=())
    refusals: tuple[str, ...] = field(default=())
    folder: Path | None = None
    vocab_is_said: bool = True

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, without padding; a tied head counts once."""
        instances = self.family.instances(self.dims)
        return sum(Box.whole(self.family.shape(weight, self.dims)).numel for weight, _ in instances)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that can be read. Where it is of no model that is known, `model` is None and `error` says why."""

    checkpoint: HfCheckpoint | MegatronCheckpoint
    model: Model | None
    error: ConfigError | None = None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why no family represents it, a line each."""
        if self.model is not None:
            return self.model.refusals
        return () if self.error is None else (self.error.message, *self.error.items)


def open_any(path: Path, *, hf_config: Path | None = None, vocab_size: int | None = None) -> Opened:
    """Open a checkpoint, of a known model or not.

    Raises:
        ConvertError: it cannot be read, or its arguments are contradictory.
    """
    try:
        model = identify(path, hf_config=hf_config, vocab_size=vocab_size)
    except ConfigError as error:
        return Opened(open_checkpoint(path), None, error)
    return Opened(model.checkpoint, model)


def open_checkpoint(path: Path, given: Mapping[str, Any] | None = None) -> HfCheckpoint | MegatronCheckpoint:
    """Open a directory in whatever format it has, headers only; of a training run its newest checkpoint.

    Args:
        given: Megatron arguments that a checkpoint without stored ones needs.

    Raises:
        UnreadableCheckpoint: it is missing, is in no known format, or is damaged.
    """
    checkpoint = _opened(path, given)
    logger.info("opened `%s`: %s, %d tensors", checkpoint.path, checkpoint.format, len(checkpoint.tensors))
    return checkpoint


def _opened(path: Path, given: Mapping[str, Any] | None) -> HfCheckpoint | MegatronCheckpoint:
    if not path.exists():
        raise absent(path)
    if not path.is_dir():
        raise UnreadableCheckpoint(f"`{path}` is not a directory", hint="name the directory that holds the checkpoint")
    if hf.detect(path):
        return hf.open_hf(path)
    if mp_rank.detect(path):
        return mp_rank.open_mp_rank(path, given)
    if zarr.detect(path):
        return zarr.open_zarr(path)
    if torch_dist.detect(path):
        return torch_dist.open_torch_dist(path)
    run = find_run(path)
    if run is not None and run.checkpoints != path:
        return _opened(run.checkpoints, given)
    if (path / hf.CONFIG).is_file():
        raise UnreadableCheckpoint(f"`{path}` has a `{hf.CONFIG}` but no weights")
    raise UnreadableCheckpoint(
        f"`{path}` is no checkpoint in a known format",
        hint="a Hugging Face directory has model.safetensors, a Megatron one .metadata or a tracker file",
    )


def identify(
    path: Path,
    *,
    family: str | None = None,
    hf_config: Path | None = None,
    vocab_size: int | None = None,
    given: Mapping[str, Any] | None = None,
) -> Model:
    """Open a checkpoint and find out what it is.

    Args:
        family: take this family instead of finding it.
        hf_config: an original `config.json`, or the directory with it, of a Megatron checkpoint.
        vocab_size: the true vocabulary of a Megatron checkpoint that does not say it.
        given: Megatron arguments that the checkpoint does not store.

    Raises:
        ConvertError: it cannot be read, no family represents it, or its arguments are contradictory.
    """
    checkpoint = open_checkpoint(path, given)
    if isinstance(checkpoint, HfCheckpoint):
        return _identify_hf(checkpoint, family)
    folder = checkpoint.carried
    config = _read_config(hf_config)
    if hf_config is not None and hf_config.is_dir():
        folder = hf_config
    if config is None and folder is not None and (folder / hf.CONFIG).is_file():
        config = hf.read_json(folder / hf.CONFIG)
    return replace(_identify_megatron(checkpoint, family, config, vocab_size), folder=folder)


def _read_config(path: Path | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    return hf.read_json(path / hf.CONFIG if path.is_dir() else path)


def _identify_hf(checkpoint: HfCheckpoint, name: str | None) -> Model:
    family = families.named(name) if name else families.of_config(checkpoint.config)
    args = arguments.normalise(family.config.to_megatron(checkpoint.config))
    vocab = args["vocab_size"]
    dims = Dims.of(args, vocab_size=vocab, padded_vocab_size=vocab)
    opened = HfCheckpoint(checkpoint.path, checkpoint.views, checkpoint.config, family.optional_prefix)
    return Model(opened, family, dims, args, checkpoint.config, folder=checkpoint.path)


def _identify_megatron(
    checkpoint: MegatronCheckpoint, name: str | None, config: Mapping[str, Any] | None, vocab_size: int | None
) -> Model:
    stored = checkpoint.common.args
    notes: list[str] = []
    refusals: tuple[str, ...] = ()
    if stored is None:
        if config is None:
            raise ConfigError(
                f"`{checkpoint.path}` stores no arguments, so its architecture is not known",
                hint="pass the model's configuration: --hf-config PATH",
            )
        family = families.named(name) if name else families.of_config(config)
        args = arguments.normalise(family.config.to_megatron(config))
        notes.append(
            "the checkpoint stores no arguments: its architecture is taken from the Hugging Face configuration"
        )
    else:
        args = arguments.normalise(stored)
        try:
            family = families.named(name) if name else families.of_arguments(args, config)
        except ConfigError as error:
            if name:
                raise
            refusals = (error.message, *error.items)
            family = gpt.family(args)
    rows = checkpoint.embedding_rows
    said = vocab = vocab_size or args.get("vocab_size") or (config or {}).get("vocab_size")
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
        tuple(notes),
        refusals,
        vocab_is_said=said is not None,
    )
