"""Whole checkpoints, damaged at random and converted: refused, or unchanged, and never anything else."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mcore_convert.checkpoints.contents import contents_of
from mcore_convert.checkpoints.identify import open_any
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.cli import main
from mcore_convert.cli.failures import BUG
from mcore_convert.storage.elements import Files as OpenFiles
from mcore_convert.storage.elements import global_tensor
from tests.fuzz.mutations import CORPUS, Files, Ranges, mutated_files
from tests.fuzz.targets import scratch

SLOW = 20  # seconds of processor time, which do not depend on who else works on the machine
BLOCKED = 600  # seconds by the clock, after which something waits for what does not come
GOOD = ("refused", "unchanged")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "hf": (("convert", "SRC", "DST", "--tp", "2"), ("convert", "SRC", "DST", "--to", "torch")),
    "hf_shards": (("convert", "SRC", "DST"),),
    "hf_bin": (("convert", "SRC", "DST"),),
    "dist": (("convert", "SRC", "DST", "--to", "hf"), ("reshard", "SRC", "DST", "--pp", "1")),
    "dist_state": (("reshard", "SRC", "DST", "--tp", "1"), ("convert", "SRC", "DST", "--to", "hf")),
    "dist_plain": (("reshard", "SRC", "DST", "--tp", "2"),),
    "ranks": (("convert", "SRC", "DST", "--to", "hf"),),
    "ranks_plain": (("reshard", "SRC", "DST", "--tp", "1"), ("convert", "SRC", "DST", "--to", "hf")),
    "ranks_distributed": (("reshard", "SRC", "DST", "--tp", "1"),),
    "fsdp": (("reshard", "SRC", "DST", "--to", "torch_dist"), ("convert", "SRC", "DST")),
    "zarr": (("convert", "SRC", "DST", "--to", "hf"), ("reshard", "SRC", "DST", "--tp", "2")),
}


class Hung(BaseException):
    """A case took longer than anything of its size can."""


@dataclass(frozen=True)
class Case:
    """What became of one case: its class, and what to know of it where that is no good one."""

    kind: str
    what: str
    messages: str = ""


class Subject:
    """One of the corpus: its files, where its tensors lie in them, and what each command makes of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        with zipfile.ZipFile(CORPUS / "checkpoints" / f"{name}.zip") as archive:
            self.files: Files = {entry: archive.read(entry) for entry in archive.namelist()}
        self.home = scratch().path / f"case-{name}"
        self.kept: Ranges = {}
        with self.laid(self.files) as source:
            for tensor in contents_of(open_any(source), optimizer=True).tensors:
                for slot in tensor.slots:
                    at = (slot.view.offset, slot.view.end)
                    self.kept.setdefault(str(slot.view.path.relative_to(source)), []).append(at)
            self.made = []
            for command in COMMANDS[name]:
                code, messages = self.run(command)
                assert code == 0, (name, command, messages)
                self.made.append((bytes_of(self.home / "DST", MANIFEST), content_of(self.home / "DST")))
                shutil.rmtree(self.home / "DST")

    @contextlib.contextmanager
    def laid(self, files: Files) -> Iterator[Path]:
        """The source, with these files, alone in a directory."""
        shutil.rmtree(self.home, ignore_errors=True)
        source = self.home / "SRC"
        source.mkdir(parents=True)
        for name, content in files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield source

    @staticmethod
    def placed(home: Path, command: tuple[str, ...]) -> list[str]:
        """Return the words of a command, with the paths that they stand for."""
        return [str(home / word) if word in ("SRC", "DST") else word for word in command]

    def run(self, command: tuple[str, ...]) -> tuple[int, str]:
        """Return the exit code and the messages of a command."""
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(self.placed(self.home, command))
        except SystemExit as end:
            return int(end.code or 0), err.getvalue()
        raise AssertionError("a command ends with its exit code")

    def case(self, seed: int) -> Case:
        """Damage a copy, as this seed says, and convert it."""
        rng = random.Random(f"{self.name} {seed}")
        files, what = mutated_files(self.files, self.kept, rng)
        number = rng.randrange(len(self.made))
        with self.laid(files) as source, alarm():
            start = time.process_time()
            try:
                code, messages = self.run(COMMANDS[self.name][number])
            except Hung:
                return Case("hang", what)
            except Exception as error:
                return Case("traceback", what, repr(error))
            if time.process_time() - start > SLOW:
                return Case("hang", what)
            if bytes_of(source) != files:
                return Case("source touched", what, messages)
            left = {file.name for file in self.home.iterdir()} - {"SRC"}
            if code == BUG:
                return Case("bug", what, messages)
            if code != 0:
                good = not left and messages.startswith(("error: ", "note: ", "Usage", "warning: "))
                return Case("refused" if good else "leftover", what, messages)
            if left != {"DST"}:
                return Case("leftover", what, f"{left} {messages}")
            written, content = self.made[number]  # the manifest names what the rest was made of, which is damaged
            same = bytes_of(self.home / "DST", MANIFEST) == written or content_of(self.home / "DST") == content
            return Case("unchanged" if same else "CHANGED WITHOUT A WORD", what, messages)


def bytes_of(path: Path, without: str = "") -> Files:
    """Return the files of a directory, but those of one name."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.name != without and file.is_file()
    }


def content_of(path: Path) -> Mapping[str, tuple[object, ...]]:
    """Return the tensors of a checkpoint, by the names that they have whatever the format."""
    with OpenFiles() as files:
        return {
            tensor.name: (tensor.dtype, tensor.shape, global_tensor(files, list(tensor.slots), tensor.shape).tobytes())
            for tensor in contents_of(open_any(path), optimizer=True).tensors
        }


def _ring(number: int, frame: FrameType | None) -> None:
    raise Hung


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """A scope that ends itself when it has worked for too long, or waited for far longer."""
    if signal.getsignal(signal.SIGPROF) is not _ring:  # which stays: a million scopes would take their time for it
        signal.signal(signal.SIGPROF, _ring)
        signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_PROF, SLOW)
    signal.setitimer(signal.ITIMER_REAL, BLOCKED)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
