"""Convert checkpoints between Hugging Face and Megatron Core, bit for bit, without a GPU."""

from typing import TYPE_CHECKING, Any

from mcore_convert.version import VERSION

if TYPE_CHECKING:
    from mcore_convert.api import Conversion, convert, diff, inspect, reshard, verify
    from mcore_convert.comparison import Comparison
    from mcore_convert.errors import ConvertError
    from mcore_convert.inspection import Inspection
    from mcore_convert.verification import Verification

__version__ = VERSION
__all__ = [
    "Comparison",
    "Conversion",
    "ConvertError",
    "Inspection",
    "Verification",
    "convert",
    "diff",
    "inspect",
    "reshard",
    "verify",
]

_HOMES = {
    "Comparison": "comparison",
    "Conversion": "api",
    "ConvertError": "errors",
    "Inspection": "inspection",
    "Verification": "verification",
    "convert": "api",
    "diff": "api",
    "inspect": "api",
    "reshard": "api",
    "verify": "api",
}


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that families can import `mcore_convert.spec` alone."""
    if name not in _HOMES:
        raise AttributeError(f"module `mcore_convert` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(f"mcore_convert.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
