"""The options of the public functions, each defined once: its name, its type and what it means.

A function takes them by name (`convert(source, destination, tp=2)`), and a type checker knows which it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

if TYPE_CHECKING:  # a command's `--help` needs no numpy
    from mcore_convert.storage.progress import Progress

PathLike = str | Path
Definition = TypeVar("Definition")


class LayoutOptions(TypedDict, total=False):
    """The layout of a Megatron model, as `mcore_convert.spec.Layout` has it; a single rank unless given.

    tp, pp, ep: tensor-, pipeline- and expert-parallel size.
    vpp: virtual pipeline stages on each pipeline rank.
    etp: tensor-parallel size of experts; `tp` unless given, or 1 where experts have biases.
    first_stage_layers, last_stage_layers: layers on the first and the last pipeline stage.
    pipeline_layout: the stages spelled out, as `--pipeline-model-parallel-layout`.
    """

    tp: int
    pp: int
    vpp: int | None
    ep: int
    etp: int | None
    first_stage_layers: int | None
    last_stage_layers: int | None
    pipeline_layout: str | None


class ModelOptions(TypedDict, total=False):
    """What a checkpoint does not say of its model.

    hf_config: original `config.json`, or its directory, of a Megatron checkpoint.
    ignore_keys: unknown keys of `config.json` that change nothing of what the model computes.
    vocab_size: true vocabulary of a Megatron checkpoint that does not store it.
    """

    hf_config: PathLike | None
    ignore_keys: Sequence[str]
    vocab_size: int | None


class FamilyOptions(ModelOptions, total=False):
    """What a checkpoint does not say of its model, and of which family it is.

    family: take this family instead of finding it.
    """

    family: str | None


class SourceOptions(FamilyOptions, total=False):
    """How the source of a conversion is read.

    given: Megatron arguments that an old checkpoint does not store.
    allow_drift: take the first rank's copy of a weight that ranks of an old run hold with small differences.
    strict: refuse NaN and infinities, which are a note otherwise.
    """

    given: Mapping[str, Any] | None
    allow_drift: bool
    strict: bool


class RunOptions(TypedDict, total=False):
    """How a command that writes is run.

    overwrite: replace a destination that exists; it stays until the new one is complete.
    resume: go on with what an earlier run left that was killed or ran out of room, and leave what this one completes if
        it ends early; the result is the same to the last byte.
    workers: threads that copy; one for each processor unless given.
    dry_run: plan and prove, write and send nothing.
    progress: called with the bytes done so far and their total, by one thread at a time. Where it has a method `phase`,
        that is called with the name of what is done next (`planning`, `copying`), and None after it.
    """

    overwrite: bool
    resume: bool
    workers: int | None
    dry_run: bool
    progress: Progress | None


class ConvertOptions(LayoutOptions, SourceOptions, RunOptions, total=False):
    """The options of `convert` and of `reshard`.

    to: `hf`, `torch_dist` or `torch`. Unless given, `convert` writes the other one of Hugging Face and `torch_dist`,
        and `reshard` the format of the source, `torch_dist` for zarr.
    optimizer: carry optimizer state from Megatron to Megatron; true unless given.
    implementation: `local` or `transformer_engine`, the layer spec of the run that will load a Megatron target; `torch`
        has its names.
    for_megatron: version of Megatron-LM that will load a Megatron target (`0.12`, `0.16.1`), which decides the form of
        optimizer state; that which wrote the source where it can be told, else the newest.
    iteration: number of the `iter_*` directory. Without one, weights alone become a `release`, and weights with
        optimizer state keep the number that they have.
    tokenizer: what `--tokenizer-model` shall name in the stored arguments; the carried files unless given.
    max_shard_size: largest safetensors or `.distcp` file, in bytes; 5 GB and 2 GiB unless given.
    revision: branch, tag or commit of a Hub id.
    stream: read a Hub id by ranges while it is converted, and keep no download of it.
    checksums: put them into the manifest; true unless given. Without them values are not looked at, and `strict` cannot
        be asked for.
    """

    to: str | None
    optimizer: bool
    implementation: str | None
    for_megatron: str | None
    iteration: int | None
    tokenizer: str | None
    max_shard_size: int | None
    revision: str | None
    stream: bool
    checksums: bool


class ModelFolderOptions(SourceOptions, total=False):
    """What a complete Hugging Face directory is made of.

    tokenizer: a directory or a name on the Hub; that of the original model or of the run unless given.
    with_tokenizer: false exports the model without one.
    dtype: `float32`, `float16` or `bfloat16`, to which weights are rounded to nearest; as stored unless given.
    from_master: take the fp32 master copies of the optimizer's state in place of the weights, which they round to.
    quantize: `fp8-block` or `int4`, to which the weights of linear layers are quantised; not at all unless given.
    max_shard_size: largest safetensors file, in bytes; 5 GB unless given.
    metadata: fields of the model card (`license`, `datasets`), over those that are found.
    """

    tokenizer: str | None
    with_tokenizer: bool
    dtype: str | None
    from_master: bool
    quantize: str | None
    max_shard_size: int | None
    metadata: Mapping[str, Any] | None


class HubOptions(TypedDict, total=False):
    """Where on the Hub a model goes.

    private: make a new repository private.
    branch: created if missing, of the repository's first commit; `main` unless given.
    tag: a name for the commit.
    commit_message: its message.
    """

    private: bool
    branch: str
    tag: str | None
    commit_message: str | None


class ExportOptions(ModelFolderOptions, HubOptions, RunOptions, total=False):
    """The options of `export`.

    push_to_hub: a repository on the Hub that the directory goes to.
    bars: let the Hub's client show its own progress on stderr.
    """

    push_to_hub: str | None
    bars: bool


def check_names(function: str, definition: type[object], options: Mapping[str, Any]) -> None:
    """Refuse options that a function does not have, as Python does.

    Raises:
        TypeError: with the first of them.
    """
    unknown = [name for name in options if name not in names_of(definition)]
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument '{unknown[0]}'")


def names_of(definition: type[object]) -> tuple[str, ...]:
    """Return the names of the options in a definition, in its order."""
    return tuple(definition.__annotations__)


def part_of(definition: type[Definition], options: Mapping[str, Any]) -> Definition:
    """Return those options that a definition has."""
    return cast(Definition, {name: options[name] for name in names_of(definition) if name in options})
