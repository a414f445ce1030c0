"""The options of the public functions, each defined once: its name, its type and its meaning.

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
    """Layout of a Megatron model, as in `mcore_convert.spec.Layout`; a single rank unless given.

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
    """Facts about the model that a checkpoint does not state.

    hf_config: original `config.json`, or its directory, of a Megatron checkpoint.
    ignore_keys: unknown keys of `config.json` that have no effect on the model's function.
    vocab_size: true vocabulary of a Megatron checkpoint that does not store it.
    """

    hf_config: PathLike | None
    ignore_keys: Sequence[str]
    vocab_size: int | None


class FamilyOptions(ModelOptions, total=False):
    """Facts about the model that a checkpoint does not state, including its family.

    family: use this family instead of the identified one.
    """

    family: str | None


class SourceOptions(FamilyOptions, total=False):
    """Options for reading the source of a conversion.

    given: Megatron arguments that an old checkpoint does not store.
    allow_drift: use the first rank's copy of a weight that ranks of an old run hold with small differences.
    strict: refuse NaN and infinities, which otherwise cause a note.
    """

    given: Mapping[str, Any] | None
    allow_drift: bool
    strict: bool


class RunOptions(TypedDict, total=False):
    """Options for running a command that writes.

    overwrite: replace a destination that exists; it stays until the new one is complete.
    resume: continue from the files of an earlier run that was killed or ran out of room, and keep those of this run if
        it ends early; the result is the same to the last byte.
    workers: threads that copy; one for each processor unless given.
    dry_run: plan and prove, write and send nothing.
    progress: called with the bytes done so far and their total, by one thread at a time. If it has a method `phase`,
        that is called with the name of the next phase (`planning`, `copying`), and with None at its end.
    """

    overwrite: bool
    resume: bool
    workers: int | None
    dry_run: bool
    progress: Progress | None


class ConvertOptions(LayoutOptions, SourceOptions, RunOptions, total=False):
    """Options of `convert` and `reshard`.

    to: `hf`, `torch_dist` or `torch`. Unless given, `convert` writes the other one of Hugging Face and `torch_dist`,
        and `reshard` the format of the source, `torch_dist` for zarr.
    optimizer: carry optimizer state from Megatron to Megatron; true unless given.
    implementation: `local` or `transformer_engine`, the layer spec of the run that will load a Megatron target; `torch`
        has its names.
    for_megatron: version of Megatron-LM that will load a Megatron target (`0.12`, `0.16.1`), which decides the form of
        optimizer state; unless given, the version that wrote the source if known, else the newest.
    iteration: number of the `iter_*` directory. Without one, weights alone become a `release`, and weights with
        optimizer state keep their number.
    tokenizer: the `--tokenizer-model` of the stored arguments; the carried files unless given.
    max_shard_size: largest safetensors or `.distcp` file, in bytes; 5 GB and 2 GiB unless given.
    revision: branch, tag or commit of a Hub id.
    stream: read a Hub id by ranges during the conversion, without a download.
    checksums: put them into the manifest; true unless given. Without them values are not examined, and `strict` is not
        available.
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
    """Options for the content of a complete Hugging Face directory.

    tokenizer: a directory or a name on the Hub; that of the original model or of the run unless given.
    with_tokenizer: false exports the model without one.
    dtype: `float32`, `float16` or `bfloat16`, to which weights are rounded to nearest; as stored unless given.
    from_master: use the fp32 master copies of the optimizer's state in place of the weights, which they round to.
    quantize: `fp8-block` or `int4`, to which the weights of linear layers are quantised; not at all unless given.
    max_shard_size: largest safetensors file, in bytes; 5 GB unless given.
    metadata: fields of the model card (`license`, `datasets`), which take precedence over known ones.
    """

    tokenizer: str | None
    with_tokenizer: bool
    dtype: str | None
    from_master: bool
    quantize: str | None
    max_shard_size: int | None
    metadata: Mapping[str, Any] | None


class HubOptions(TypedDict, total=False):
    """Destination on the Hub.

    private: make a new repository private.
    branch: created if missing, at the repository's first commit; `main` unless given.
    tag: a name for the commit.
    commit_message: its message.
    """

    private: bool
    branch: str
    tag: str | None
    commit_message: str | None


class ExportOptions(ModelFolderOptions, HubOptions, RunOptions, total=False):
    """Options of `export`.

    push_to_hub: a repository on the Hub that the directory goes to.
    bars: let the Hub's client show its own progress on stderr.
    """

    push_to_hub: str | None
    bars: bool


def check_names(function: str, definition: type[object], options: Mapping[str, Any]) -> None:
    """Refuse options that a function does not have, as Python does.

    Raises:
        TypeError: names the first such option.
    """
    unknown = [name for name in options if name not in names_of(definition)]
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument '{unknown[0]}'")


def names_of(definition: type[object]) -> tuple[str, ...]:
    """Return the names of the options in a definition, in its order."""
    return tuple(definition.__annotations__)


def part_of(definition: type[Definition], options: Mapping[str, Any]) -> Definition:
    """Return the options that a definition has."""
    return cast(Definition, {name: options[name] for name in names_of(definition) if name in options})
