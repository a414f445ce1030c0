"""Pickles that try to run code, by every opcode that names or calls something and in every place that has pickles."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

MARK = "executed"  # a file, made by whatever of these is run

SHELL, PYTHON = f"touch {MARK}", f"open({MARK!r}, 'w')"
# What attacks call, with what they give it. Names with dots are those of attributes.
CALLS: tuple[tuple[str, str, object], ...] = (
    ("os", "system", SHELL),
    ("posix", "system", SHELL),
    ("os", "popen", SHELL),
    ("os", "mkdir", MARK),
    ("os", "remove", MARK),
    ("nt", "system", SHELL),
    ("subprocess", "Popen", ["touch", MARK]),
    ("subprocess", "check_output", ["touch", MARK]),
    ("subprocess", "getoutput", SHELL),
    ("pty", "spawn", ["touch", MARK]),
    ("builtins", "eval", PYTHON),
    ("builtins", "exec", PYTHON),
    ("__builtin__", "eval", PYTHON),
    ("builtins", "__import__", "this"),
    ("builtins", "open", MARK),
    ("builtins", "getattr", "os"),
    ("builtins", "bytearray", 2**40),
    ("builtins", "type", "x"),
    ("builtins", "set.__init__.__globals__", SHELL),
    ("io", "open", MARK),
    ("pathlib", "Path.touch", MARK),
    ("pathlib", "PosixPath.touch", MARK),
    ("importlib", "import_module", "this"),
    ("runpy", "run_path", MARK),
    ("runpy", "_run_code", PYTHON),
    ("code", "InteractiveInterpreter", PYTHON),
    ("timeit", "timeit", PYTHON),
    ("pdb", "run", PYTHON),
    ("cProfile", "run", PYTHON),
    ("functools", "partial", os.getcwd),
    ("operator", "methodcaller", "system"),
    ("operator", "attrgetter", "system"),
    ("types", "CodeType", 0),
    ("types", "FunctionType", 0),
    ("marshal", "loads", b"c"),
    ("pickle", "loads", b"cos\nsystem\n."),
    ("torch", "load", MARK),
    ("torch.hub", "load", "x"),
    ("torch.utils.cpp_extension", "load", MARK),
    ("torch._utils", "_rebuild_tensor_v2.__globals__", MARK),
    ("torch.storage", "_load_from_bytes", b"cos\nsystem\n."),
    ("torch.jit", "load", MARK),
    ("numpy", "save", MARK),
    ("numpy.testing._private.utils", "runstring", PYTHON),
    ("numpy.f2py.crackfortran", "getlincoef", PYTHON),
    ("megatron.core.utils", "import_module", "os"),
    ("signal", "Signals", 9),
    ("argparse", "Namespace.__class__", SHELL),
    ("collections", "OrderedDict.fromkeys", [SHELL]),
    ("shutil", "rmtree", "."),
    ("socket", "create_connection", ("127.0.0.1", 9)),
    ("urllib.request", "urlopen", "http://127.0.0.1:9"),
    ("webbrowser", "open", "http://127.0.0.1:9"),
    ("ctypes", "CDLL", "libc.so.6"),
    ("mcore_convert.formats.files.pickles", "load", MARK),
)
# What a checkpoint may name, which an attack can combine with the rest.
LAWFUL = (
    ("collections", "OrderedDict"),
    ("argparse", "Namespace"),
    ("_codecs", "encode"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("megatron.core.enums", "ModelType"),
    ("numpy", "ndarray"),
    ("pathlib", "PosixPath"),
    ("builtins", "set"),
    ("builtins", "bytearray"),
)
ATTRIBUTES = ("__setstate__", "__reduce__", "__class__", "__dict__", "__call__", "__getattr__", "__init__", "keys", "a")


def hostile(rng: random.Random) -> bytes:
    """Return a pickle that calls something, by a way and in a place that the dice choose."""
    body = b"".join(
        rng.choice((_call, _call, _build, _list, _mapping))(rng, 0) for _ in range(rng.choice((1, 1, 2, 3)))
    )
    return b"\x80" + bytes([rng.choice((2, 3, 4, 5))]) + body + b"."


def _value(content: object) -> bytes:
    return pickle.dumps(content, 2)[2:-1]


def _named(module: str, name: str, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    return _value(module) + _value(name) + b"\x93"


def _callable(rng: random.Random) -> tuple[bytes, bytes]:
    module, name, argument = rng.choice(CALLS)
    if rng.random() < 0.3:
        module, name = rng.choice(LAWFUL)
    return _named(module, name, rng), _value(argument)


def _call(rng: random.Random, depth: int) -> bytes:
    function, argument = _callable(rng)
    if depth < 4 and rng.random() < 0.3:
        argument = rng.choice((_call, _build, _list, _mapping))(rng, depth + 1)
    if rng.random() < 0.2:  # the call of a lawful function is given the other
        function, argument = _named(*rng.choice(LAWFUL), rng), function + argument
        return function + b"(" + argument + b"tR"
    module, name, _ = rng.choice(CALLS)
    return rng.choice((
        function + argument + b"\x85R",  # REDUCE
        function + argument + b"\x85\x81",  # NEWOBJ
        function + argument + b"\x85}\x92",  # NEWOBJ_EX
        b"(" + function + argument + b"o",  # OBJ
        b"(" + argument + b"i" + module.encode() + b"\n" + name.encode() + b"\n",  # INST
        function + b")R" + _value({"a": 1}) + b"b",  # BUILD on what it made
        function + argument + b"\x85Q",  # BINPERSID of a tuple
        b"(" + _value("storage") + function + _value("0") + _value("cpu") + _value(4) + b"tQ",
        b"\x82\x01" + argument + b"\x85R",  # EXT1
        function + b"q\x000h\x00" + argument + b"\x85R",  # from the memo
        function + argument + b"\x85R" + argument + b"\x85R",  # calls what the call returned
        function + argument,  # named, and called by nobody
    ))  # fmt: skip


def _build(rng: random.Random, depth: int) -> bytes:
    """Return an object whose state is a function."""
    function, argument = _callable(rng)
    maker = _named(*rng.choice(LAWFUL), rng) + rng.choice((b")R", b")\x81", b"(" + argument + b"tR"))
    state = b"}(" + _value(rng.choice(ATTRIBUTES)) + function + b"u"
    return maker + rng.choice((state, b"N" + state + b"\x86", function, state + argument + b"\x86")) + b"b"


def _list(rng: random.Random, depth: int) -> bytes:
    items = b"".join(_call(rng, depth + 1) for _ in range(rng.randrange(1, 3)))
    return b"](" + items + rng.choice((b"e", b"l", b"t", b"\x90", b"\x91"))


def _mapping(rng: random.Random, depth: int) -> bytes:
    key, value = (_call(rng, depth + 1) if rng.random() < 0.5 else _value("args") for _ in "ab")
    return b"}(" + key + value + b"u"


def archived(data: bytes) -> bytes:
    """Return a pickle as the content of an archive of torch."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return packed.getvalue()


def in_old_archive(data: bytes) -> bytes:
    """Return a pickle as the tree of an archive in torch's first form."""
    head = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}})
    return b"".join(pickle.dumps(each, 2) for each in head) + data + pickle.dumps([], 2)


class Executed(BaseException):
    """A pickle ran code."""


EVENTS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn",
    "os.remove", "os.rmdir", "os.mkdir", "os.rename", "shutil.rmtree", "socket.connect", "ctypes.dlopen", "exec",
)  # fmt: skip
_watching = False


def _heard(event: str, _: object) -> None:
    if _watching and event in EVENTS:
        raise Executed(event)


sys.addaudithook(_heard)  # which cannot be taken back


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """A scope in which no code may run: no process, no module, no change of files, no connection.

    Raises:
        Executed: it did.
    """
    global _watching
    before, _watching = Path.cwd(), True
    os.chdir(folder)
    try:
        yield
    finally:
        _watching = False
        os.chdir(before)
    if (folder / MARK).exists():
        raise Executed(MARK)
