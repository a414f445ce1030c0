"""Reading pickles without the packages that they name: a restricted unpickler.

Checkpoints are pickles of torch, Megatron and argparse objects. The reader runs none of their code: it builds inert
records for the few classes that define a checkpoint's structure, stand-ins for Megatron's own (which change with every
release), and refuses every other global by name.
"""

from __future__ import annotations

import collections
import copy
import io
import operator
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mcore_convert.errors import UnreadableCheckpoint, UnsafePickle
from mcore_convert.formats.files.pickle_budget import check_keys
from mcore_convert.formats.files.pickle_prices import ELEMENT, PAIR, Budget, TooMuch
from mcore_convert.formats.files.pickle_records import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Function,
    Metadata,
    MetadataIndex,
    Namespace,
    Sealed,
    StandIn,
    StorageInfo,
    StorageRef,
    TensorProperties,
    TensorRef,
    TensorStorageMetadata,
    are_counts,
    are_shapes,
)
from mcore_convert.formats.files.pickle_walk import MAX_PICKLE, Unfinished, end_of
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.storage.views import DTYPE_SIZES

__all__ = [
    "DAMAGE",
    "DTYPE_STORAGES",
    "Metadata",
    "MetadataIndex",
    "RestrictedUnpickler",
    "StandIn",
    "StorageRef",
    "TensorRef",
    "TensorStorageMetadata",
    "are_counts",
    "are_shapes",
    "load",
    "reason_of",
]

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e5m2Storage": "float8_e5m2",
}
DTYPE_STORAGES = {dtype: storage for storage, dtype in STORAGE_DTYPES.items()}

# Packages whose classes appear in checkpoints without being needed (enums in `args`, plans, random states). slime and
# miles keep their data sets for evaluation in `args` (`utils/arguments.py`, `eval_datasets`).
STAND_IN_PACKAGES = (
    "megatron",
    "transformer_engine",
    "apex",
    "nemo",
    "nemo_rl",
    "nvidia_resiliency_ext",
    "numpy",
    "signal",
    "slime",
    "miles",
    "lightning",
    "pytorch_lightning",
)
STAND_IN_GLOBALS = (
    "torch.device",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.BytesIOWriteData",
)


@dataclass(frozen=True)
class _StorageType:
    dtype: str | None  # None for an untyped storage, which counts bytes


def _rebuild_tensor(budget: Budget, storage: StorageRef, offset: int, shape: Any, strides: Any, *_: Any) -> TensorRef:
    budget.take(8 * (len(shape) + len(strides)), "the shapes of tensors")
    sizes, steps = tuple(shape), tuple(strides)
    if not isinstance(storage, StorageRef) or len(sizes) != len(steps) or not are_counts(offset, *sizes, *steps):
        raise ValueError("a tensor is not described by its storage and integers")
    return TensorRef(storage, offset, sizes, steps)


def _rebuild_tensor_v3(
    budget: Budget, storage: StorageRef, offset: int, shape: Any, strides: Any, *rest: Any
) -> TensorRef:
    dtype = rest[2].name
    typed = StorageRef(storage.key, dtype, storage.numel // DTYPE_SIZES[dtype])
    return _rebuild_tensor(budget, typed, offset, shape, strides)


def _rebuild_parameter(_: Budget, data: TensorRef, *__: Any) -> TensorRef:
    return data


def _rebuild_from_type(_: Budget, rebuild: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    return rebuild(*args)


def _encode(budget: Budget, text: str, encoding: str = "utf-8") -> bytes:
    """Do what `_codecs.encode` does in pickles: return bytes written by protocol 2."""
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise UnsafePickle(f"a pickle asks for the encoding `{encoding}`")
    budget.take(4 * len(text), "bytes")
    return text.encode(encoding)


def _bytearray(budget: Budget, content: bytes | str = b"", encoding: str = "latin1") -> bytearray:
    """Return a bytearray of content; unlike `bytearray`, a number is refused, which would allocate as many bytes."""
    budget.take(2 * len(content), "bytes")
    return bytearray(content if isinstance(content, bytes) else _encode(budget, content, encoding))


def _set(budget: Budget, items: Sequence[Any] = ()) -> set[Any]:
    budget.take(ELEMENT * len(items), "sets")
    check_keys(items)
    return set(items)


def _frozenset(budget: Budget, items: Sequence[Any] = ()) -> frozenset[Any]:
    return frozenset(_set(budget, items))


def _ordered(budget: Budget, items: Sequence[tuple[Any, Any]] = ()) -> collections.OrderedDict[Any, Any]:
    if items:  # the hooks of a tensor are empty
        budget.take(PAIR * len(items), "dicts")
        check_keys([key for key, _ in items])
    return collections.OrderedDict(items)


_ALLOWED: dict[str, Any] = {
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.slice": slice,
    "builtins.complex": complex,
    "builtins.bytearray": _bytearray,
    "__builtin__.set": _set,
    "__builtin__.frozenset": _frozenset,
    "collections.OrderedDict": _ordered,
    "argparse.Namespace": Namespace,
    "_codecs.encode": _encode,
    "pathlib.PosixPath": StandIn,
    "pathlib.WindowsPath": StandIn,
    "pathlib._local.PosixPath": StandIn,
    "torch.Size": types.MethodType(operator.concat, ()),  # returns a tuple unchanged, and refuses anything else
    "torch.Tensor": StandIn,
    "torch.nn.parameter.Parameter": StandIn,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.storage.UntypedStorage": _StorageType(None),
    "torch.distributed.checkpoint.metadata.Metadata": Metadata,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": Metadata,
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata": TensorStorageMetadata,
    "torch.distributed.checkpoint.metadata.TensorProperties": TensorProperties,
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": ChunkStorageMetadata,
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata": BytesStorageMetadata,
    "torch.distributed.checkpoint.metadata.MetadataIndex": MetadataIndex,
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
    **{f"torch.{name}": _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{f"torch.{dtype}": TorchDtype(dtype) for dtype in DTYPE_SIZES},
}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler of the classes above, and no others.

    Raises:
        UnsafePickle: the pickle names another class or function, which the message has.
    """

    def __init__(self, file: IO[bytes], budget: Budget | None = None) -> None:
        super().__init__(file)
        self._globals: dict[str, Any] = {}
        self._budget = Budget() if budget is None else budget

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._globals:
            self._globals[full] = self._named(module, name, full)
        return self._globals[full]

    def _named(self, module: str, name: str, full: str) -> Any:
        if full in _ALLOWED:
            return _own(_ALLOWED[full], self._budget)
        if full in STAND_IN_GLOBALS or module.split(".")[0] in STAND_IN_PACKAGES:
            return _sealed(name, StandIn, module, self._budget)
        raise UnsafePickle(
            f"a pickle names `{full}`, which no checkpoint needs",
            hint="this file may try to run code; it was not loaded",
        )

    def persistent_load(self, pid: Any) -> StorageRef:
        kind, storage, key, _location, numel, *view = pid
        if not isinstance(key, (str, int)):  # the name of another value could be arbitrarily long
            raise ValueError("it refers to a storage that has no name")
        if kind != "storage" or not isinstance(storage, _StorageType) or type(numel) is not int or numel < 0:
            raise ValueError("it refers to something that is not a tensor storage")
        if any(view):
            raise ValueError("it has views of storages, which torch has not written since 0.4")
        return StorageRef(str(key), storage.dtype or "uint8", numel)


def _own(value: Any, budget: Budget) -> Any:
    """Return a copy of an entry of the table for one pickle: the opcode BUILD may change the object,
    and must not change the table.
    """
    if isinstance(value, type):
        return _sealed(value.__name__, value, value.__module__, budget) if isinstance(value, Sealed) else value
    if isinstance(value, types.MethodType):  # a C function, without state
        return value
    return Function(value, budget) if isinstance(value, types.FunctionType) else copy.copy(value)


def _sealed(name: str, kind: type, module: str, budget: Budget) -> Sealed:
    """Return a subclass for one pickle only."""
    return Sealed(name, (kind,), {"__module__": module, "__slots__": (), "_budget": budget})


# Errors that an unpickler can raise for damaged bytes; any other error is a defect of this package and must surface.
DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    UnicodeDecodeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


def load(file: IO[bytes], where: str) -> Any:
    """Read one pickle from a file that is positioned at its beginning.

    Raises:
        UnsafePickle: it names a class that is not allowed.
        UnreadableCheckpoint: it is damaged. Both messages contain `where`.
    """
    try:
        budget = Budget()
        return RestrictedUnpickler(io.BytesIO(_one_pickle(file, budget)), budget).load()
    except UnsafePickle as error:
        raise UnsafePickle(f"{error.message}, in {where}", hint=error.hint) from None
    except TooMuch as error:
        raise UnreadableCheckpoint(
            f"{where} is not read: {error}",
            hint="no checkpoint is known that needs as much; if this is a real one, please report its size",
        ) from None
    except DAMAGE as error:
        raise UnreadableCheckpoint(f"{where} is damaged: {reason_of(error)}") from error


def _one_pickle(file: IO[bytes], budget: Budget) -> bytes:
    """Return the bytes of the pickle at a file's position, after scanning it, and move the position to its end."""
    start, window, whole = file.tell(), 2**20, budget.left
    while True:
        file.seek(start)
        data = file.read(window)
        budget.left = whole - len(data)
        try:
            end = end_of(data, budget)
        except Unfinished:
            if len(data) < window:
                raise
            if window >= MAX_PICKLE:
                raise ValueError(f"it has more than {MAX_PICKLE:,} bytes") from None
            window = min(window * 32, MAX_PICKLE)
        else:
            file.seek(start + end)
            budget.take(end if end < len(data) else 0, "a copy of its own")  # the slice of a longer file
            return data[:end]


def reason_of(error: Exception) -> str:
    """Return the message of an exception in DAMAGE."""
    return f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
