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
from mcore_convert.cli import main
from mcore_convert.cli.failures import BUG
from mcore_convert.storage.elements import Files as OpenFiles
from mcore_convert.storage.elements import global_tensor
from tests.fuzz.mutations import CORPUS, Files, Ranges, mutated_files
from tests.fuzz.targets import scratch

SLOW = 20  # seconds
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
    said: str = ""


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
                code, said = self.run(command)
                assert code == 0, (name, command, said)
                self.made.append(content_of(self.home / "DST"))
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
        """The words of a command, with the paths that they stand for."""
        return [str(home / word) if word in ("SRC", "DST") else word for word in command]

    def run(self, command: tuple[str, ...]) -> tuple[int, str]:
        """The exit code and the messages of a command."""
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
            start = time.monotonic()
            try:
                code, said = self.run(COMMANDS[self.name][number])
            except Hung:
                return Case("hang", what)
            except Exception as error:
                return Case("traceback", what, repr(error))
            if time.monotonic() - start > SLOW:
                return Case("hang", what)
            after = {str(file.relative_to(source)): file.read_bytes() for file in source.rglob("*") if file.is_file()}
            if after != files:
                return Case("source touched", what, said)
            left = {file.name for file in self.home.iterdir()} - {"SRC"}
            if code == BUG:
                return Case("bug", what, said)
            if code != 0:
                good = not left and said.startswith(("error: ", "note: ", "Usage", "warning: "))
                return Case("refused" if good else "leftover", what, said)
            if left != {"DST"}:
                return Case("leftover", what, f"{left} {said}")
            same = content_of(self.home / "DST") == self.made[number]
            return Case("unchanged" if same else "CHANGED WITHOUT A WORD", what, said)


def content_of(path: Path) -> Mapping[str, tuple[object, ...]]:
    """The tensors of a checkpoint, by the names that they have whatever the format."""
    with OpenFiles() as files:
        return {
            tensor.name: (tensor.dtype, tensor.shape, global_tensor(files, list(tensor.slots), tensor.shape).tobytes())
            for tensor in contents_of(open_any(path), optimizer=True).tensors
        }


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """A scope that ends itself."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SLOW)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
