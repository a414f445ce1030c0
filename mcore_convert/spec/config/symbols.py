"""Names in the configurations of other programs (`_target_`): read as data, never imported and never called.

Megatron-Bridge and NeMo write a value that is not plain as a mapping with the name of a class or a function:

    {_target_: torch.bfloat16, _call_: false}                                a dtype or a function
    {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [5]}    an enum
    {_target_: torch.nn.init.normal_, _partial_: true, _args_: [], std: 0.02}             a functools.partial
    {_target_: torch.dtype, _call_: true}                                    NeMo's form of a dtype, without its name

Facts are from Megatron-Bridge 0.2 to 0.6 (`utils/yaml_utils.py`, `training/utils/config_utils.py`) and NeMo 2.4
(`lightning/io/mixin.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import DTYPES

TARGET, CALL, PARTIAL = "_target_", "_call_", "_partial_"
KEYS_OF_NAMES = (TARGET, "_builder_")

DTYPE_NAMES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.float32": "float32",
    "torch.float": "float32",
}

# Packages whose classes and functions a configuration may name. Of torch, only values and initialisation functions.
KNOWN = re.compile(
    r"""
    megatron\.(bridge|core|training|energon)\.[\w.<>]+
    | nemo(_rl|_run)?\.[\w.<>]+
    | (nvidia_resiliency_ext|transformer_engine|modelopt|lightning|pytorch_lightning|fiddle)\.[\w.<>]+
    | (transformers|numpy|nvidia)\.[\w.<>]+
    | torch\.(dtype|(bfloat|float|int|uint)\d+(_\w+)?|half|float|double|bool|long|int|short|device)
    | torch\.jit\.ScriptFunction
    | torch\.nn\.(functional|init|modules|parameter)\.[\w.]+
    | torch\._C\._nn\.\w+
    | torch\._C\._distributed_c10d\.\w+
    | torch\.(optim|distributed|cuda|utils\.data)\.[\w.]+
    | signal\.Signals | contextlib\.nullcontext | pathlib\.(Posix|Windows|PurePosix|)Path | functools\.partial
    """,
    re.VERBOSE,
)
# Names within those that load or execute their argument.
LOADERS = re.compile(
    r"\.(loads?|load_\w+|import_\w+|safe_import\w*|eval|exec|from_(hf_)?pretrained|locate|instantiate|system|popen)"
)


class _Opaque:
    """Marker for a value that is not plain."""


OPAQUE = _Opaque()


def refuse_unknown(tree: Any, where: str) -> None:
    """Refuse a configuration that names anything but classes and functions of known packages.

    Raises:
        ConfigError: with each such name and its place. None of them is imported.
    """
    wrong = [
        f"{place}: {name if isinstance(name, str) else repr(name)}"
        for place, name in _names(tree, "")
        if not isinstance(name, str) or not KNOWN.fullmatch(name) or LOADERS.fullmatch(name[name.rfind(".") :])
    ]
    if wrong:
        raise ConfigError(
            f"{where} names what is not known, and nothing is imported to find out",
            items=wrong,
            hint="move the file aside if you do not trust it; --hf-config PATH says the architecture in its stead",
        )


def _names(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            inner = f"{place}.{key}" if place else str(key)
            if key in KEYS_OF_NAMES:
                yield inner, value
            else:
                yield from _names(value, inner)
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _names(value, f"{place}[{number}]")


def name_of(value: Any) -> str | None:
    """Return the name of the class or function that a value stands for; a string is its own name."""
    if isinstance(value, Mapping):
        value = value.get(TARGET)
    return value if isinstance(value, str) else None


def plain_fields(values: Any) -> dict[str, Any]:
    """Return the fields of a section that have plain values; none if it is not a mapping."""
    if not isinstance(values, Mapping):
        return {}
    named = {name: plain_value(value) for name, value in values.items() if isinstance(name, str)}
    return {name: value for name, value in named.items() if value is not OPAQUE and not name.startswith("_")}


def plain_value(value: Any) -> Any:
    """Return a value in the form of Megatron-LM's arguments; OPAQUE for a class, a function or an enum."""
    if isinstance(value, Mapping):
        if TARGET in value:
            dtype = DTYPE_NAMES.get(str(value[TARGET]))
            return OPAQUE if dtype is None else DTYPES[dtype]
        parts = {key: plain_value(each) for key, each in value.items()}
        return OPAQUE if OPAQUE in parts.values() else parts
    if isinstance(value, list):
        inner = [plain_value(each) for each in value]
        return OPAQUE if any(each is OPAQUE for each in inner) else inner
    if isinstance(value, str) and value in DTYPE_NAMES:
        return DTYPES[DTYPE_NAMES[value]]
    return value
