"""Writing pickles of classes that need not be importable: they are named, not loaded."""

from __future__ import annotations

import argparse
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mcore_convert.formats.files.pickles import DTYPE_STORAGES, TensorRef
from mcore_convert.spec.config.arguments import TorchDtype


@dataclass(frozen=True)
class Global:
    """A class or function by name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """What a call of `function` returns."""

    function: Global
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of `kind` with a state. Each is itself, so that it can be the key of a dict."""

    kind: Global
    state: Any


@dataclass(frozen=True)
class _Persistent:
    pid: tuple[Any, ...]


class _Pickler(pickle._Pickler):
    """Protocol 2, with the records of this module in place of the classes that they name."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)
    save: Callable[[Any], None]
    write: Callable[[bytes], Any]

    def memoize(self, obj: Any) -> None:
        """Remember names only: remembering every object would cost more memory than all else that writing needs."""
        if isinstance(obj, str | Global):
            super().memoize(obj)  # type: ignore[misc]  # typeshed leaves it out

    def save_global_name(self, item: Global) -> None:
        self.write(pickle.GLOBAL + f"{item.module}\n{item.name}\n".encode())
        self.memoize(item)

    def save_call(self, item: Call) -> None:
        self.save(item.function)
        self.save(item.args)
        self.write(pickle.REDUCE)

    def save_instance(self, item: Instance) -> None:
        self.save(item.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        if item.state is not None:
            self.save(item.state)
            self.write(pickle.BUILD)

    def save_persistent(self, item: _Persistent) -> None:
        self.save(item.pid)
        self.write(pickle.BINPERSID)

    def save_dtype(self, item: TorchDtype) -> None:
        self.save(Global("torch", item.name))

    def save_namespace(self, item: argparse.Namespace) -> None:
        self.save(Instance(Global("argparse", "Namespace"), dict(vars(item))))

    def save_tensor(self, item: TensorRef) -> None:
        storage = item.storage
        kind = Global("torch", DTYPE_STORAGES[storage.dtype])
        persistent = _Persistent(("storage", kind, storage.key, "cpu", storage.numel))
        hooks = Call(Global("collections", "OrderedDict"), ())
        rebuild = Global("torch._utils", "_rebuild_tensor_v2")
        self.save(Call(rebuild, (persistent, item.offset, item.shape, item.strides, False, hooks)))

    dispatch[Global] = save_global_name
    dispatch[Call] = save_call
    dispatch[Instance] = save_instance
    dispatch[_Persistent] = save_persistent
    dispatch[TorchDtype] = save_dtype
    dispatch[argparse.Namespace] = save_namespace
    dispatch[TensorRef] = save_tensor


def dumps(tree: Any) -> bytes:
    """The pickle of a tree of plain values, Namespaces and the records of this module."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(tree)
    return buffer.getvalue()
