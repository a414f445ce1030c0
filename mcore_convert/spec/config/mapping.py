"""A family's configuration mapping: `config.json` <-> Megatron-LM arguments, both directions from one table.

A mapping is total. Every key of `config.json` belongs to a field of the table or to the list of keys without effect;
every Megatron argument that changes the function belongs to a field or must be neutral (`NEUTRAL`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.neutral import INERT, MEANING, ONLY, is_inert, not_neutral
from mcore_convert.spec.layers import check_number

Values = Mapping[str, Any]

KNOWN = {*INERT, *ONLY, "layer_types"}

REQUIRED = object()  # as a default: the key is required
ABSENT = object()


class Refused(Exception):
    """Refusal of a field: one line for each value that the other side cannot represent."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__(*lines)


@dataclass(frozen=True)
class Field:
    """One fact about a model: its keys and arguments, and the conversion in both directions.

    `hf` maps keys of `config.json` to the value that an absent key stands for, the default of the class in
    transformers. `megatron` names the arguments that the field covers. Both functions get all keys or arguments, and
    raise `Refused`. `none_says`: None is a value of the arguments, and not a sign that a version did not store them.
    """

    hf: Values
    megatron: tuple[str, ...]
    to_megatron: Callable[[Values], dict[str, Any]]
    to_hf: Callable[[Values], dict[str, Any]]
    none_says: bool = False


MAX_SHOWN = 200  # characters of a value in an error

# Errors that a field's functions raise for a value of the wrong type, such as `"x"` for a number.
NONSENSE = (TypeError, ValueError, IndexError, OverflowError, ZeroDivisionError)


def architectures_of(config: Values) -> list[str]:
    """Return the `architectures` of a `config.json`.

    Raises:
        ConfigError: it is not a list of names.
    """
    names = config.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"`architectures` = {shown(names)} is not a list of names")
    return names


def shown(value: Any) -> str:
    """Format a value as `config.json` spells it."""
    text = "(absent)" if value is ABSENT else json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


@dataclass(frozen=True)
class ConfigMapping:
    """The table of a family: its fields, and the `model_type` and architecture (the first) that it writes.

    `dialects` are other model types whose configurations describe the same weights; they are read, and never written.
    """

    model_type: str
    architectures: tuple[str, ...]
    fields: tuple[Field, ...]
    dialects: tuple[ConfigMapping, ...] = ()

    def to_megatron(self, config: Values) -> dict[str, Any]:
        """Return the Megatron arguments of the architecture for a `config.json`; `completion.complete` adds the rest.

        Raises:
            ConfigError: keys or values that Megatron cannot represent, all of them at once.
        """
        mapping = self._dialect(config)
        args, problems = mapping._read(config)
        mapping._refuse(config, problems)
        return args

    def to_hf(self, args: Values) -> dict[str, Any]:
        """Return a complete `config.json` for normalised Megatron arguments.

        Raises:
            ConfigError: arguments that the family cannot represent, all of them at once.
        """
        config, problems = self._write(args)
        if problems:
            raise ConfigError(f"`{self.model_type}` cannot represent these Megatron arguments", items=problems)
        return config

    def refusals(self, args: Values) -> list[str]:
        """Return one line for each reason why the family cannot represent these arguments; empty if it can."""
        return self._write(args)[1]

    def merge(self, original: Values, args: Values) -> tuple[dict[str, Any], list[str]]:
        """Change only those fields of the original `config.json` that differ from the arguments.

        Return the configuration and one line for each change. A field differs if it maps to other arguments, so an
        equivalent spelling is kept.

        Raises:
            ConfigError: as `to_hf`; or the original has unknown keys, or is another model.
        """
        mapping = self._dialect(original)
        mapping._refuse(original, [])
        fresh = mapping.to_hf(args)
        filled = mapping._filled(original)
        result, changes = dict(original), []
        for field in mapping.fields:
            if not _differs(field, filled, args):
                continue
            for key, absent in field.hf.items():
                old, new = original.get(key, ABSENT), fresh.get(key, ABSENT)
                alike = old == new and isinstance(old, bool) == isinstance(new, bool)  # in Python, False == 0.0
                if alike or (new == absent and old is ABSENT):
                    continue
                changes.append(f"`{key}` {shown(old)} -> {shown(new)}")
                if new is ABSENT:
                    result.pop(key, None)
                else:
                    result[key] = new
        return result, changes

    def _dialect(self, config: Values) -> ConfigMapping:
        """Return the mapping, this one or a dialect, for the model that a `config.json` names."""
        for mapping in (self, *self.dialects):
            if config.get("model_type", ABSENT) == mapping.model_type:
                break
            if "model_type" not in config and set(architectures_of(config)) & set(mapping.architectures):
                break
        else:
            raise ConfigError(f"`model_type` = {shown(config.get('model_type', ABSENT))} is not `{self.model_type}`")
        stranger = [name for name in architectures_of(config) if name not in mapping.architectures]
        if stranger:
            known = ", ".join(f"`{name}`" for name in mapping.architectures)
            raise ConfigError(f"`architectures` = {shown(stranger)} is not {known}")
        return mapping

    def _filled(self, config: Values) -> dict[str, Any]:
        """Return the configuration with class defaults for absent keys."""
        defaults = {key: value for field in self.fields for key, value in field.hf.items() if value is not REQUIRED}
        return {**defaults, **config}

    def ignoring(self, keys: Iterable[str]) -> ConfigMapping:
        """Return the mapping with further keys of `config.json` that the user declares to have no effect.

        Raises:
            ConfigError: a key is known and may change the model.
        """
        claimed = {key for mapping in (self, *self.dialects) for field in mapping.fields for key in field.hf}
        known = [key for key in keys if key in claimed or key in KNOWN]
        if known:
            raise ConfigError(
                "only an unknown key of `config.json` can be ignored",
                items=[f"`{key}` is known, and may change the model" for key in known],
            )
        extra = Field(dict.fromkeys(keys, ABSENT), (), lambda _: {}, lambda _: {})
        dialects = tuple(replace(mapping, fields=(*mapping.fields, extra)) for mapping in self.dialects)
        return replace(self, fields=(*self.fields, extra), dialects=dialects)

    def keys_of(self, argument: str) -> list[str]:
        """Return the keys of `config.json` that determine an argument."""
        return [key for field in self.fields if argument in field.megatron for key in field.hf]

    def _strangers(self, config: Values) -> dict[str, Any]:
        """Return the keys that no field covers and that are not known to have no effect."""
        claimed = {"model_type", "architectures", *(key for field in self.fields for key in field.hf)}
        return {key: value for key, value in config.items() if key not in claimed and not is_inert(key, value)}

    def _refuse(self, config: Values, problems: list[str]) -> None:
        """Refuse values that Megatron cannot represent, and unknown keys, which may change the model."""
        strangers = self._strangers(config)
        lines = {key: f"`{key}` = {shown(value)}" for key, value in strangers.items()}
        meant = [f"{line}: {MEANING[key]}" if key in MEANING else line for key, line in lines.items() if key in KNOWN]
        unknown = {key: f"unknown key {line}" for key, line in lines.items() if key not in KNOWN}
        hint = None
        if unknown:
            options = " ".join(f"--ignore-key {key}" for key in unknown)
            hint = f"where a key changes nothing of what the model computes: {options}"
        if problems or meant:
            items = [*meant, *unknown.values(), *problems]
            raise ConfigError("Megatron Core cannot represent this `config.json`", items=items, hint=hint)
        if unknown:
            message = "this `config.json` has keys that are not known, and that may change the model"
            raise ConfigError(message, items=unknown.values(), hint=hint)

    def _read(self, config: Values) -> tuple[dict[str, Any], list[str]]:
        filled, problems = self._filled(config), list[str]()
        args: dict[str, Any] = {}
        for key in self.keys_of("num_layers"):
            check_number(filled.get(key), key)
        for field in self.fields:
            missing = [key for key in field.hf if key not in filled]
            try:
                if missing:
                    raise Refused(*(f"`{key}` is missing" for key in missing))
                args |= field.to_megatron(filled)
            except Refused as refused:
                problems += refused.lines
            except NONSENSE:
                problems.append(" and ".join(f"`{key}` = {shown(filled[key])}" for key in field.hf) + " makes no sense")
        return args, problems

    def _write(self, args: Values) -> tuple[dict[str, Any], list[str]]:
        claimed = {name for field in self.fields for name in field.megatron}
        problems = [f"`{name}` = {args[name]!r}" for name in not_neutral(args) if name not in claimed]
        config: dict[str, Any] = {"architectures": [self.architectures[0]], "model_type": self.model_type}
        for field in self.fields:
            try:
                config |= field.to_hf(args)
            except Refused as refused:
                problems += refused.lines
            except NONSENSE:
                values = [f"`{name}` = {args.get(name)!r}" for name in field.megatron]
                problems.append(" and ".join(values) + " makes no sense")
        return config, problems


def _differs(field: Field, filled: Values, args: Values) -> bool:
    """Return whether a field of a configuration differs from the arguments."""
    try:
        stated = field.to_megatron(filled)
    except (Refused, KeyError, *NONSENSE):  # not representable, or absent without a default: the arguments decide
        return True
    known = {name: value for name, value in stated.items() if field.none_says or args.get(name) is not None}
    return any(args.get(name) != value for name, value in known.items())
