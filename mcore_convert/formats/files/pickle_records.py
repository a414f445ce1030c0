"""Stand-ins for the classes and functions that checkpoints name: records that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_convert.errors import UnsafePickle
from mcore_convert.spec.config.arguments import TorchDtype

INTEGERS = {int}  # and not bool


class Sealed(type):
    """The type of classes that a pickle may name, and not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafePickle(f"a pickle changes the class `{cls.__name__}`")


class Record(metaclass=Sealed):
    """An inert object: its pickled state lies in `__dict__`, and nothing can be called on it."""


class Function:
    """A function of ours that a pickle may call. It has no state that a pickle could set."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__setstate__(value)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickle(f"a pickle changes the function `{self._call.__name__}`")


class StandIn(Record):
    """A class or function that is not needed: it keeps its name and arguments and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """List items of a pickled subclass are dropped."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Dict items of a pickled subclass are dropped."""

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.arguments}>"


class Metadata(Record):
    """`torch.distributed.checkpoint.metadata.Metadata`."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


class TensorStorageMetadata(Record):
    """Shape, dtype and chunks of one key."""

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: list[ChunkStorageMetadata]


class TensorProperties(Record):
    """Pickled as a tuple that begins with the dtype."""

    dtype: TorchDtype | None = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state.get("dtype")


class ChunkStorageMetadata(Record):
    """Offsets and sizes of one chunk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class BytesStorageMetadata(Record):
    """A key that holds an object."""


class MetadataIndex(Record):
    """Which chunk of which key; the key of `storage_data`."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MetadataIndex) and (self.fqn, self.offset) == (other.fqn, other.offset)


class StorageInfo(Record):
    """File, offset and length of one chunk."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


@dataclass(frozen=True)
class StorageRef:
    """A storage of a torch file: its record, dtype and size in elements."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a torch file, in elements of its storage. No byte of it has been read."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def are_counts(*numbers: Any) -> bool:
    """Return whether all of these are integers that count something, as a hostile pickle need not have it."""
    # Asked for every chunk of a checkpoint: a generator would take five times as long.
    return {*map(type, numbers)} <= INTEGERS and min(numbers, default=0) >= 0
