"""The parsers of what strangers wrote, each as a function of bytes that ends with a refusal or well, and never else."""

from __future__ import annotations

import copy
import io
import os
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mcore_convert.checkpoints.families import families
from mcore_convert.checkpoints.identify import identify
from mcore_convert.errors import ConvertError
from mcore_convert.formats.files import dcp, pickles, safetensors
from mcore_convert.formats.files.chunk_archives import ChunkArchives
from mcore_convert.formats.files.pickle_budget import check_tree
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.hf.checkpoint import open_hf
from mcore_convert.formats.megatron.run_directory import parse_tracker
from mcore_convert.formats.torch_dist import zarr
from mcore_convert.inspection.page.curve import curve_data, read_metrics
from mcore_convert.publishing.tokenizer import read_tokenizer
from tests.fuzz.hostile import archived, in_old_archive, watched
from tests.fuzz.mutations import CORPUS
from train_entry.config.files import read as read_run_file
from train_entry.data.bin_idx import check_tokens, open_pair

Target = Callable[[bytes], None]

MEMORY_BACKED = Path("/dev/shm")


class Scratch:
    """A directory of this process, in memory where there is such a place."""

    def __init__(self) -> None:
        place = MEMORY_BACKED if os.access(MEMORY_BACKED, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="mcore-convert-fuzz-", dir=place)
        self.path = Path(self._folder.name)

    def remove(self) -> None:
        """Remove it, in a process that ends without doing so."""
        self._folder.cleanup()

    def file(self, name: str, content: bytes) -> Path:
        """Return a file with this content; what had the name is overwritten."""
        path = self.path / name
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
        path.write_bytes(content)
        return path


_scratch: dict[int, Scratch] = {}


def scratch() -> Scratch:
    """Return the directory of this process, which may have been forked."""
    if os.getpid() not in _scratch:
        _scratch[os.getpid()] = Scratch()
    return _scratch[os.getpid()]


def of_file(read: Callable[[Path], object], name: str, place: str = "") -> Target:
    """Return a target that writes a file and gives its path, or that of the directory that has it at `name`."""

    def target(data: bytes) -> None:
        file = scratch().file(f"{place or name}/{name}", data)
        read(file.parents[name.count("/")] if place else file)

    return target


def pickle(data: bytes) -> None:
    """Run the restricted unpickler."""
    check_tree(pickles.load(io.BytesIO(data), "`x`"))


def attack(data: bytes) -> None:
    """Read a pickle that tries to run code, alone and in each kind of file that has pickles."""
    with watched(_before_attacks()):
        _in_each_file(data)


def _in_each_file(data: bytes) -> None:
    contents = {"pickle": data, "archive": archived(data), "legacy": in_old_archive(data), "metadata": data}
    for name, content in contents.items():
        attempt(name, content)


@cache
def _before_attacks() -> Path:
    """Return a directory of their own, when what reads them is imported and has its places."""
    for seed in seeds_of("attack"):
        _in_each_file(seed)
    (scratch().path / "attack").mkdir()
    return scratch().path / "attack"


def archive(file: Path) -> None:
    """Read an archive, and what it says of its records."""
    list(TorchFile(file).sums)


def item(data: bytes) -> None:
    """Read an archive within a `.distcp` file, among the seeds: parsed on its own and like others, always the same."""
    file = scratch().file("item/__0_0.distcp", b"before!" + data + b"behind")
    archives = copy.deepcopy(_read_seeds())
    for _ in range(2):  # what is read first may give its form to what is read next
        assert parsed_alike(archives, file, 7, len(data)) == parsed_alone(file, 7, len(data))
    TorchFile(file, 7, len(data))


def parsed_alone(file: Path, offset: int, length: int) -> tuple[str, object]:
    """Return what an archive holds, or why it is refused."""
    try:
        archive = TorchFile(file, offset, length)
    except ConvertError as error:
        return "", (type(error), str(error))
    return repr(archive.tree), archive.sums


def parsed_alike(archives: ChunkArchives, file: Path, offset: int, length: int) -> tuple[str, object]:
    """Return the same by a reader that knows others."""
    try:
        ((_, tree, sums),) = archives.read(file.parent, [(file.name, offset, length)])
    except ConvertError as error:
        return "", (type(error), str(error))
    return repr(tree), sums


@cache
def _read_seeds() -> ChunkArchives:
    archives = ChunkArchives()
    for seed in seeds_of("item"):
        parsed_alike(archives, scratch().file("seed/__0_0.distcp", seed), 0, len(seed))
    return archives


def config(data: bytes) -> None:
    """Read a model's configuration, with the weights of another beside it."""
    folder = scratch().path / "config"
    if not folder.is_dir():
        with zipfile.ZipFile(CORPUS / "checkpoints" / "hf.zip") as archive:
            archive.extractall(folder)
    (folder / "config.json").write_bytes(data)
    identify(folder)


def index(data: bytes) -> None:
    """Read an index of weights, with the files that it names."""
    folder = scratch().path / "index"
    if not folder.is_dir():
        with zipfile.ZipFile(CORPUS / "checkpoints" / "hf_shards.zip") as archive:
            archive.extractall(folder)
    (folder / "model.safetensors.index.json").write_bytes(data)
    open_hf(folder)


def idx(data: bytes) -> None:
    """Read an index of training data."""
    file = scratch().file("idx/x.idx", data)
    scratch().file("idx/x.bin", bytes(20))
    pair = open_pair(str(file.with_suffix("")))
    pair.lengths()
    check_tokens(pair, 100)


TARGETS: dict[str, Target] = {
    "safetensors": of_file(safetensors.read, "x.safetensors"),
    "metadata": of_file(dcp.read, ".metadata", "metadata"),
    "archive": of_file(archive, "x.pt"),
    "item": item,
    "legacy": of_file(archive, "old.pt"),
    "pickle": pickle,
    "attack": attack,
    "config": config,
    "index": index,
    "zarray": of_file(zarr.read, "weight/.zarray", "zarray"),
    "tracker": of_file(parse_tracker, "latest_checkpointed_iteration.txt"),
    "idx": idx,
    "run_file": of_file(read_run_file, "run.yaml"),
    "metrics": of_file(lambda file: curve_data(read_metrics(file), 1), "metrics.jsonl"),
    "sentencepiece": of_file(read_tokenizer, "tokenizer.model", "sentencepiece"),
    "tokenizer": of_file(read_tokenizer, "tokenizer.json", "tokenizer"),
}
SEEDS = {"item": "archive", "attack": "pickle"}  # targets that begin at the corpus of another


@cache
def seeds_of(target: str) -> list[bytes]:
    """Return what a target begins at."""
    return [file.read_bytes() for file in sorted((CORPUS / SEEDS.get(target, target)).iterdir())]


def attempt(target: str, data: bytes) -> bool:
    """Return whether a target takes the bytes; a refusal is the other good end, and anything else is raised."""
    refusals: tuple[type[Exception], ...] = (ConvertError, *REFUSALS.get(target, ()))
    try:
        TARGETS[target](data)
    except refusals:
        return False
    return True


# What the callers of a parser make a refusal of.
REFUSALS: dict[str, tuple[type[Exception], ...]] = {"pickle": (ValueError,), "tracker": (OSError,), "index": (OSError,)}

families()  # read once, before a process is forked
