"""Commands of a page without their imports: `mcore-convert` and `python -` run in forks of one process that has
imported torch and Megatron Core before, which takes many times as long as what a page shows.

`commands(folder)` gives a folder for the front of PATH. What they do, print and end with is that of fresh processes;
that they load no more than they need is for test_imports.py to say.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mcore_convert.megatron.cpu import import_megatron
from tests.kinds import ROOT

# Nothing that reads the environment while it is imported, as huggingface_hub does.
BEFORE = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "hydra",
    "pydantic",
)
CLIENT = """#!{python} -SIE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
os._exit(server.recv(1)[0])
"""
REQUEST = 4  # bytes of a request's length


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """A folder with the two commands, which are there while this lasts."""
    path = str(folder / "socket")
    for name in ("mcore-convert", "python"):
        (folder / name).write_text(CLIENT.format(python=sys.executable, path=path, name=name))
        (folder / name).chmod(0o755)
    command = [sys.executable, "-m", "tests.warm", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.read(1) == b"+", "the server did not start"
            yield folder
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def serve(path: str) -> Callable[[], object]:
    """Answer requests for ever; in the process of a request, return what it is to run."""
    import_megatron()
    for module in BEFORE:
        importlib.import_module(module)
    early = [name for name in ("huggingface_hub", "transformers", "train_entry", "converters") if name in sys.modules]
    assert not early, f"{early} would not see the environment of a command"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        os.write(1, b"+")
        while True:
            client, _ = server.accept()
            if not os.fork():
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, descriptors, *_ = socket.recv_fds(client, REQUEST, 3)
    name, arguments, folder, environment = json.loads(_exactly(client, int.from_bytes(length, "big")))
    if command := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        client.sendall(bytes([code if code >= 0 else 128 - code]))
        os._exit(0)
    client.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _enter(folder, environment)
    return _program(name, arguments)


def _exactly(client: socket.socket, length: int) -> bytes:
    with client.makefile("rb") as file:
        return file.read(length)


def _enter(folder: str, environment: dict[str, str]) -> None:
    """Make this process one that was started there, with these variables, unbuffered."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0), encoding="utf-8", write_through=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0), encoding="utf-8", write_through=True)  # noqa: SIM115


def _program(name: str, arguments: list[str]) -> Callable[[], object]:
    sys.argv = [name, *arguments]
    if name == "mcore-convert":
        from mcore_convert.__main__ import main

        return main
    script, *sys.argv = ["<stdin>" if arguments[0] == "-" else arguments[0], *arguments]
    text = sys.stdin.read() if script == "<stdin>" else Path(script).read_text()
    return lambda: exec(compile(text, script, "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    serve(sys.argv[1])()
