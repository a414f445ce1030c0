"""Stand-ins for the classes and functions that checkpoints name: inert records."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from mcore_convert.errors import UnsafePickle
from mcore_convert.formats.files.pickle_prices import PAIR, SOME_PAIRS, Budget
from mcore_convert.spec.config.arguments import TorchDtype

INTEGERS = {int}  # but not bool
MAX_DIMS = 64  # of a tensor, as in torch


class Sealed(type):
    """Metaclass of classes that a pickle may name but not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafePickle(f"a pickle changes the class `{cls.__name__}`")


class Record(metaclass=Sealed):
    """An inert object: it keeps the needed fields and has no methods to call.

    The state dict from the pickle is cleared: the unpickler's memo keeps every dict until the end, and dicts took most
    of the memory for a large checkpoint.
    """

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        state.clear()


class Namespace(argparse.Namespace, metaclass=Sealed):
    """`argparse.Namespace` whose state dict is cleared, as that of a Record."""

    _budget: ClassVar[Budget]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._budget.take(SOME_PAIRS + PAIR * len(state), "arguments")
        vars(self).update(state)
        state.clear()


class Function:
    """A function of this package that a pickle may call, with the pickle's budget. Its state cannot be set."""

    __slots__ = ("_budget", "_call")
    _call: Callable[..., Any]
    _budget: Budget

    def __init__(self, call: Callable[..., Any], budget: Budget) -> None:
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_budget", budget)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(self._budget, *arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__setstate__(value)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickle(f"a pickle changes the function `{self._call.__name__}`")


class StandIn(Record):
    """Stand-in for a class or function that is not needed: keeps its name, its arguments and a tuple as its state."""

    __slots__ = ("arguments", "state")
    _budget: ClassVar[Budget | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self._budget is not None:
            self._budget.take(8 * len(args), "arguments")
        self.arguments = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            self.state = state

    def append(self, item: Any) -> None:
        """Drop a list item of a pickled subclass."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop a dict item of a pickled subclass."""

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {getattr(self, 'arguments', ())}>"


class Metadata(Record):
    """`torch.distributed.checkpoint.metadata.Metadata`, with the field that Megatron Core adds."""

    __slots__ = ("mcore_data", "state_dict_metadata", "storage_data")
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    mcore_data: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state_dict_metadata, self.storage_data = state["state_dict_metadata"], state["storage_data"]
        self.mcore_data = state.get("mcore_data", {})
        state.clear()


class TensorStorageMetadata(Record):
    """Shape, dtype and chunks of one key."""

    __slots__ = ("chunks", "properties", "size")
    properties: TensorProperties
    size: tuple[int, ...]
    chunks: list[ChunkStorageMetadata]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.properties, self.size, self.chunks = state["properties"], state["size"], state["chunks"]
        state.clear()


class TensorProperties(Record):
    """Properties of a tensor, pickled as a tuple that begins with the dtype."""

    __slots__ = ("dtype",)
    dtype: TorchDtype | None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state.get("dtype")


class ChunkStorageMetadata(Record):
    """Offsets and sizes of one chunk."""

    __slots__ = ("offsets", "sizes")
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets, self.sizes = state["offsets"], state["sizes"]
        state.clear()


class BytesStorageMetadata(Record):
    """A key that holds an object."""

    __slots__ = ()


class MetadataIndex(Record):
    """Key and offset of a chunk: a key of `storage_data`. Equal keys stay distinct objects, and the last one counts."""

    __slots__ = ("fqn", "offset")
    fqn: str
    offset: tuple[int, ...] | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fqn, self.offset = state["fqn"], state.get("offset")
        state.clear()


class StorageInfo(Record):
    """File, offset and length of one chunk."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.relative_path, self.offset, self.length = state["relative_path"], state["offset"], state["length"]
        self.transform_descriptors = state.get("transform_descriptors")
        state.clear()


class StorageRef(NamedTuple):
    """A storage of a torch file: its record, dtype and size in elements."""

    key: str
    dtype: str
    numel: int


class TensorRef(NamedTuple):
    """A tensor of a torch file, in elements of its storage. No byte of it has been read."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def are_counts(*numbers: Any) -> bool:
    """Return whether all values are non-negative integers, which a hostile pickle may not have."""
    # Called for every chunk of a checkpoint: a generator would take five times as long.
    return {*map(type, numbers)} <= INTEGERS and min(numbers, default=0) >= 0


def are_shapes(shapes: list[Any], num_dims: int | None = None) -> bool:
    """Return whether all values are shapes or offsets: tuples of counts, with `num_dims` entries if given."""
    widths = {*map(len, shapes)} if {*map(type, shapes)} <= {tuple} else {MAX_DIMS + 1}
    if max(widths, default=0) > MAX_DIMS or (num_dims is not None and not widths <= {num_dims}):
        return False
    return are_counts(*chain.from_iterable(shapes))
