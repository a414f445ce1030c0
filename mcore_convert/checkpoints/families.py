"""The installed families, discovered through the entry point `mcore_convert.families`, and the choice for a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.model_folder import CONFIG
from mcore_convert.plugins import REPAIR, Plugins, load
from mcore_convert.spec import gpt
from mcore_convert.spec.config.mapping import architectures_of, shown
from mcore_convert.spec.config.neutral import NEUTRAL, NEUTRAL_OF_EXPERTS
from mcore_convert.spec.config.without_effect import OF_RUNS, WITHOUT_EFFECT
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family

GROUP = "mcore_convert.families"
ADD = "`mcore-convert families` lists those that are installed; docs/add-a-family.md says how to add one"
UNREPRESENTED = "mcore_convert.unrepresented"
SHOWN_ARGUMENTS = 8


@lru_cache(maxsize=1)
def plugins() -> Plugins[Family]:
    """Return the installed families, and why others cannot be used."""
    return load(entry_points(group=GROUP), Family, "family")


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Return every installed family by its name; other packages add theirs through the entry point.

    A family that cannot be loaded is left out.
    """
    installed = {family.name: family for family in plugins().objects}
    if not installed:
        hint = "install the package: `pip install mcore-convert`"
        raise ConfigError("no family is installed", items=plugins().broken.values(), hint=hint)
    return dict(sorted(installed.items()))


@lru_cache(maxsize=1)
def unrepresented() -> dict[str, str]:
    """Return the architectures that are known but not converted, with the reason; other packages may add some."""
    lists = load(entry_points(group=UNREPRESENTED), dict, "list of architectures").objects
    return dict(sorted((name, why) for reasons in lists for name, why in reasons.items()))


@lru_cache(maxsize=1)
def known_arguments() -> frozenset[str]:
    """Return the arguments of Megatron-LM that a family maps, that are checked, or that are known to change nothing."""
    mapped = (name for family in families().values() for field in family.config.fields for name in field.megatron)
    return frozenset(
        {*mapped, *NEUTRAL, *NEUTRAL_OF_EXPERTS, *gpt.UNKNOWN, *gpt.WEIGHT_SHARDS, *WITHOUT_EFFECT, *OF_RUNS}
    )


def remarks(args: Mapping[str, Any]) -> list[str]:
    """Return a note on the arguments that are set and not known: those of a fork, or of a release to come."""
    known = known_arguments()
    strange = [
        f"`{name}` = {shown(value)}"
        for name, value in args.items()
        if value and name not in known and not name.startswith("_")
    ]
    if not strange:
        return []
    more = f", and {len(strange) - SHOWN_ARGUMENTS} more" if len(strange) > SHOWN_ARGUMENTS else ""
    listed = ", ".join(strange[:SHOWN_ARGUMENTS]) + more
    return [f"no known release of Megatron-LM has these arguments, and they are taken to change nothing: {listed}"]


def named(name: str) -> Family:
    """Return the family of this name.

    Raises:
        ConfigError: there is none.
    """
    if name in plugins().broken:
        raise ConfigError(plugins().broken[name], hint=REPAIR)
    if name not in families():
        raise ConfigError(f"there is no family `{name}`", hint=ADD)
    return families()[name]


def of_config(config: Mapping[str, Any]) -> Family:
    """Return the family of a `config.json`, by its `architectures`, else its `model_type`.

    Raises:
        ConfigError: no family reads it.
    """
    family = _reader_of(config)
    if family is not None:
        return family
    architectures, kind = architectures_of(config), config.get("model_type")
    reasons = [f"`{name}`: {unrepresented()[name]}" for name in architectures if name in unrepresented()]
    if reasons:
        raise ConfigError("such a model is not converted", items=reasons)
    shown = f"`architectures` = {architectures}" if architectures else f"`model_type` = {kind!r}"
    raise ConfigError(f"no family reads a model with {shown}", items=plugins().broken.values(), hint=ADD)


def _reader_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family that reads a `config.json`; of several, as when a package adds its own, the most prevalent."""
    architectures, kind = architectures_of(config), config.get("model_type")
    readers = [
        family
        for family in families().values()
        if set(architectures) & set(family.architectures) or (not architectures and kind in _model_types(family))
    ]
    return max(readers, key=lambda family: family.prevalence, default=None)


def _model_types(family: Family) -> list[str]:
    return [mapping.model_type for mapping in (family.config, *family.config.dialects)]


@dataclass(frozen=True)
class Choice:
    """The family chosen for Megatron arguments, the others that fit as well, and the reason for the choice.

    `reason` is empty where the model itself decides: only one family fits, or its `config.json` is known.
    """

    family: Family
    others: tuple[Family, ...] = ()
    reason: str = ""

    @property
    def note(self) -> str | None:
        """Note to the user about the choice; None if there was nothing to choose."""
        if not self.reason:
            return None
        others = ", ".join(f"`{family.name}`" for family in self.others)
        return f"taken for a `{self.family.name}`: {self.reason}; {others} would fit too, and --family chooses"


def of_arguments(args: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Family:
    """Return the family of normalised Megatron arguments, as `choose` finds it."""
    return choose(args, config).family


def choose(args: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Choice:
    """Choose the family of normalised Megatron arguments, of those that can represent them.

    Several may be the same to Megatron. In this order: the family that reads the original `config.json`; the one whose
    export has exactly the weights of the model; the one that the run's tokenizer belongs to; the one whose
    architecture most programs read (`Family.prevalence`).

    Args:
        config: the original `config.json`, if known.

    Raises:
        ConfigError: no family can, with the reasons of the nearest ones; or several fit and no rule decides.
    """
    refusals = {name: family.config.refusals(args) for name, family in families().items()}
    fitting = [families()[name] for name, lines in refusals.items() if not lines]
    reader = None if config is None else _reader_of(config)
    if not fitting:
        nearest = reader or min(families().values(), key=lambda f: (len(refusals[f.name]), -f.prevalence))
        raise ConfigError(
            f"no family can represent this model; `{nearest.name}` comes nearest, but for",
            items=dict.fromkeys(refusals[nearest.name]),
            hint=ADD,
        )
    left, why = fitting, list[str]()
    for reason, cost in _rules(args, reader):
        if len(left) == 1:
            break
        costs = {family.name: cost(family) for family in left}
        kept = [family for family in left if costs[family.name] == min(costs.values())]
        if len(kept) < len(left):
            left, why = kept, [*why, reason]
    if len(left) > 1:
        raise ConfigError(
            "several families fit this model, and nothing tells which it is",
            items=[f"{family.name}: {', '.join(family.architectures)}" for family in left],
            hint="--family chooses",
        )
    others = tuple(family for family in fitting if family is not left[0])
    return Choice(left[0], others, "; of those, ".join(filter(None, why)))


def _rules(args: Mapping[str, Any], reader: Family | None) -> Iterator[tuple[str, Callable[[Family], int]]]:
    """Yield the rules of `choose`: the reason to give for a family that wins by the rule, and its score for a family,
    smaller for a better one.
    """
    yield "", lambda family: family is not reader
    yield "its export adds no weight that the model lacks, and loses none", lambda family: _unfaithful(family, args)
    tokenizer = args.get("tokenizer_model")
    if isinstance(tokenizer, str):
        yield f"the run's tokenizer is `{tokenizer}`", lambda family: -_named_by(tokenizer, family)
    yield "most programs read its architecture", lambda family: -family.prevalence


def _unfaithful(family: Family, args: Mapping[str, Any]) -> int:
    """Return the number of rows that the family or Megatron's model lacks; an export would invent or lose them."""
    dims = Dims.of(args, vocab_size=1, padded_vocab_size=1)
    rows, plain = (
        {weight.name for weight in weights if weight.exists(dims)} for weights in (family.weights, gpt.weights(args))
    )
    return len(rows ^ plain)


def _named_by(tokenizer: str, family: Family) -> int:
    """Return how strongly the name of a tokenizer, or the configuration beside it, points to a family; 0 for none."""
    file = Path(tokenizer) / CONFIG
    if file.is_file():
        return len(tokenizer) if _reader_of(read_json(file)) is family else 0
    name = _letters("/".join(Path(tokenizer).parts[-2:]))
    return max((len(word) for word in map(_letters, [family.name, *_model_types(family)]) if word in name), default=0)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
