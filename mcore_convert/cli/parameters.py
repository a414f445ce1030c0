"""The options of the public functions as parameters of commands, each defined once."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mcore_convert.cli import options
from mcore_convert.cli.choices import arguments
from mcore_convert.options import names_of


class Parameter(NamedTuple):
    """Option of the public functions, as a parameter of a command.

    `name` is the name of the command's parameter, and `value_of` converts its value to the option's.
    """

    name: str
    annotation: Any
    default: Any = None
    value_of: Callable[[Any], Any] = lambda value: value


# Every option of `mcore_convert.options` except `progress` and `bars`, which have no place on a command line.
# They are shown in this order.
PARAMETERS: dict[str, Parameter] = {
    "family": Parameter("family", options.Family),
    "hf_config": Parameter("hf_config", options.HfConfig),
    "ignore_keys": Parameter("ignore_key", options.IgnoreKey, None, lambda keys: keys or ()),
    "vocab_size": Parameter("vocab_size", options.VocabSize),
    "given": Parameter("arg", options.Given, None, arguments),
    "allow_drift": Parameter("allow_drift", options.AllowDrift, False),
    "revision": Parameter("revision", options.Revision),
    "stream": Parameter("stream", options.Stream, False),
    "tp": Parameter("tp", options.Tp, 1),
    "pp": Parameter("pp", options.Pp, 1),
    "vpp": Parameter("vpp", options.Vpp),
    "ep": Parameter("ep", options.Ep, 1),
    "etp": Parameter("etp", options.Etp),
    "first_stage_layers": Parameter("first_stage_layers", options.FirstStage),
    "last_stage_layers": Parameter("last_stage_layers", options.LastStage),
    "pipeline_layout": Parameter("pipeline_layout", options.PipelineLayout),
    "to": Parameter("to", options.To),
    "optimizer": Parameter("no_optimizer", options.NoOptimizer, False, operator.not_),
    "implementation": Parameter("implementation", options.Names, None, lambda chosen: chosen and chosen.value),
    "for_megatron": Parameter("for_megatron", options.ForMegatron),
    "iteration": Parameter("iteration", options.Iteration),
    "tokenizer": Parameter("tokenizer", options.Tokenizer),
    "with_tokenizer": Parameter("no_tokenizer", options.NoTokenizer, False, operator.not_),
    "dtype": Parameter("dtype", options.ToDtype, None, lambda chosen: chosen and chosen.value),
    "from_master": Parameter("from_master", options.FromMaster, False),
    "quantize": Parameter("quantize", options.Quantize, None, lambda chosen: chosen and chosen.value),
    "max_shard_size": Parameter("max_shard_size", options.MaxShardSize),
    "strict": Parameter("strict", options.Strict, False),
    "checksums": Parameter("no_checksums", options.NoChecksums, False, operator.not_),
    "metadata": Parameter("metadata", options.Metadata, None, arguments),
    "overwrite": Parameter("overwrite", options.Overwrite, False),
    "resume": Parameter("resume", options.Resume, False),
    "workers": Parameter("workers", options.Workers),
    "push_to_hub": Parameter("push_to_hub", options.PushToHub),
    "private": Parameter("private", options.Private, False),
    "branch": Parameter("branch", options.Branch, "main"),
    "tag": Parameter("tag", options.Tag),
    "commit_message": Parameter("commit_message", options.CommitMessage),
    "dry_run": Parameter("dry_run", options.DryRun, False),
}
# Every command has these after its own; their callbacks take effect.
LOGGING = (Parameter("verbose", options.Verbose, 0), Parameter("log_level", options.LogLevel))


def taking(
    *definitions: type[object], without: Collection[str] = (), **instead: Parameter
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some definitions of `mcore_convert.options` in place of its `**options`.

    The options for logging are added to each command, but not passed to it.

    Args:
        without: options that the command does not have.
        instead: parameters that this command defines itself, by the option's name.
    """
    names = {name for definition in definitions for name in names_of(definition)} - {*without}
    chosen = {name: instead.get(name, each) for name, each in PARAMETERS.items() if name in names}

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        expanded, logging = (
            [inspect.Parameter(each.name, kind, default=each.default, annotation=each.annotation) for each in some]
            for some in (chosen.values(), LOGGING)
        )

        @functools.wraps(command)
        def run(*args: Any, **values: Any) -> None:
            for each in LOGGING:
                del values[each.name]
            command(*args, **{name: each.value_of(values.pop(each.name)) for name, each in chosen.items()}, **values)

        positional = [each for each in own.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        keywords = [each for each in own.parameters.values() if each.kind is kind]
        taken = [*positional, *expanded, *keywords, *logging]
        run.__signature__ = own.replace(parameters=taken)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in taken}
        return run

    return decorated
