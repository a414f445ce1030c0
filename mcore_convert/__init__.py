"""Convert checkpoints between Hugging Face and Megatron Core, bit for bit, without a GPU."""

from typing import TYPE_CHECKING, Any

from mcore_convert.version import VERSION

if TYPE_CHECKING:
    from mcore_convert.api import Conversion, convert, diff, inspect, reshard, verify, verify_files
    from mcore_convert.comparison.distance import Comparison
    from mcore_convert.comparison.equality import Verification
    from mcore_convert.comparison.integrity import Integrity
    from mcore_convert.errors import ConvertError
    from mcore_convert.inspection.describe import Inspection
    from mcore_convert.publishing.publish import Export, export, push
    from mcore_convert.publishing.streams import iter_hf_weights, load_hf_model
    from mcore_convert.publishing.sweep import Swept, export_all
    from mcore_convert.publishing.upload import Upload

__version__ = VERSION
__all__ = [
    "Comparison",
    "Conversion",
    "ConvertError",
    "Export",
    "Inspection",
    "Integrity",
    "Swept",
    "Upload",
    "Verification",
    "convert",
    "diff",
    "export",
    "export_all",
    "inspect",
    "iter_hf_weights",
    "load_hf_model",
    "push",
    "reshard",
    "verify",
    "verify_files",
]

_HOMES = {
    "Comparison": "comparison.distance",
    "Conversion": "api",
    "ConvertError": "errors",
    "Export": "publishing.publish",
    "Inspection": "inspection.describe",
    "Integrity": "comparison.integrity",
    "Swept": "publishing.sweep",
    "Upload": "publishing.upload",
    "Verification": "comparison.equality",
    "convert": "api",
    "diff": "api",
    "export": "publishing.publish",
    "export_all": "publishing.sweep",
    "inspect": "api",
    "iter_hf_weights": "publishing.streams",
    "load_hf_model": "publishing.streams",
    "push": "publishing.publish",
    "reshard": "api",
    "verify": "api",
    "verify_files": "api",
}


def __getattr__(name: str) -> Any:
    """Import public names at first use, so that families can import `mcore_convert.spec` alone."""
    if name not in _HOMES:
        raise AttributeError(f"module `mcore_convert` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(f"mcore_convert.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
