"""Commands without their imports: `mcore-convert`, `torchrun` and `python` (a script, `-`, or `-m MODULE`) run in forks
of one process that has imported torch, transformers and Megatron Core before, which takes many times as long as what
most tests start.

`commands(folder)` gives a folder for the front of PATH; torchrun starts its ranks by the one that `PYTHON_EXEC` names.
What they do, print and end with is that of fresh processes; that they load no more than they need is for
test_imports.py to say.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from mcore_convert.megatron.cpu import import_megatron
from tests.kinds import ROOT

BEFORE = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.launcher.api",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "hydra",
    "pydantic",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "mcore_convert.__main__",
    "mcore_convert.conversion.execute",
    "mcore_convert.inspection.report",
    "train_entry.command_line",
    "train_entry.pretrain",
)
MODULES = {"mcore-convert": "mcore_convert", "torchrun": "torch.distributed.run", "python": None}
SETTINGS = "HF_"  # what huggingface_hub reads while it is imported
OFFLINE = {"HF_HUB_OFFLINE": "1"}
CLIENT = """#!{python} -SIE
import json, os, signal, socket, sys
if {{name: value for name, value in os.environ.items() if name.startswith({prefix!r})}} != {settings!r}:
    os.execv({python!r}, [{python!r}, *{module!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
network = os.open("/proc/self/ns/net", os.O_RDONLY)
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2, network])
server.sendall(request)
code = int.from_bytes(server.recv(1), "big")
if code > 128:
    if code != 128 + signal.SIGKILL:
        signal.signal(code - 128, signal.SIG_DFL)
    os.kill(os.getpid(), code - 128)
os._exit(code)
"""
REQUEST = 4  # bytes of a request's length


def environment(folder: Path) -> dict[str, str]:
    """Return that of a command of `folder`, without the Hub, which starts the ranks of torchrun by it as well."""
    return {**os.environ, **OFFLINE, "PYTHON_EXEC": str(folder / "python")}


@contextlib.contextmanager
def commands(folder: Path, settings: Mapping[str, str] = OFFLINE) -> Iterator[Path]:
    """A folder with the commands, which are there while this lasts.

    Args:
        settings: of the Hub's client. Where others are set, a command starts afresh.
    """
    path = str(folder / "socket")
    common = {"python": sys.executable, "path": path, "prefix": SETTINGS, "settings": dict(settings)}
    for name, module in MODULES.items():
        words = [] if module is None else ["-m", module]
        (folder / name).write_text(CLIENT.format(name=name, module=words, **common))
        (folder / name).chmod(0o755)
    command = [sys.executable, "-m", "tests.warm", path]
    others = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**others, **settings},
        start_new_session=True,
    ) as server:
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
    assert "converters" not in sys.modules, "a command finds its families on its own path"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all that is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        os.write(1, b"+")
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:  # until the tests that started it end
            client, _ = server.accept()
            if not os.fork():
                break
            client.close()
        else:
            return lambda: None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, (*descriptors, network), *_ = socket.recv_fds(client, REQUEST, 4)
    name, arguments, folder, variables = json.loads(_exactly(client, int.from_bytes(length, "big")))
    if command := os.fork():
        _wait(command, client)
    client.close()
    _enter_network(network)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _enter(folder, variables)
    return _program(name, arguments)


def _wait(command: int, client: socket.socket) -> NoReturn:
    """Answer with the command's exit code; a command whose client was killed is ended."""
    ended = os.pidfd_open(command)
    if ended not in select.select([ended, client.fileno()], [], [])[0]:
        os.kill(command, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _exactly(client: socket.socket, length: int) -> bytes:
    with client.makefile("rb") as file:
        return file.read(length)


def _enter_network(descriptor: int) -> None:
    """Make the network of who asks, which may stand for another host, that of this process."""
    is_here = os.fstat(descriptor).st_ino == Path("/proc/self/ns/net").stat().st_ino
    if not is_here and ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def _enter(folder: str, variables: dict[str, str]) -> None:
    """Make this process one that was started there, with these variables, unbuffered."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0), encoding="utf-8", write_through=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0), encoding="utf-8", write_through=True)  # noqa: SIM115


def _program(name: str, arguments: list[str]) -> Callable[[], object]:
    while arguments[:1] == ["-u"]:  # so it is
        del arguments[0]
    if (module := MODULES[name]) is None and arguments[0] == "-m":
        _, module, *arguments = arguments
        sys.path.insert(0, str(Path.cwd()))
    if module == "mcore_convert":
        from mcore_convert.__main__ import main

        sys.argv = ["mcore-convert", *arguments]
        return main
    if module is not None:
        sys.argv = [module, *arguments]
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    script, *sys.argv = ["<stdin>" if arguments[0] == "-" else arguments[0], *arguments]
    text = sys.stdin.read() if script == "<stdin>" else Path(script).read_text()
    return lambda: exec(compile(text, script, "exec"), {"__name__": "__main__"})


def run(program: Callable[[], object]) -> NoReturn:
    """Run a program to its end. Python's own end would take seconds: it clears each module that was imported."""
    code = 0
    try:
        program()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run(serve(sys.argv[1]))
