"""Copies where the kernel cannot copy, map or keep room: the same bytes by plain reads and writes."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from mcore_convert import convert
from mcore_convert.spec.shard import Box
from mcore_convert.storage import mapping
from mcore_convert.storage.elements import Files
from mcore_convert.storage.gather import gathered, scattered
from mcore_convert.storage.views import TensorMeta, View
from tests.conftest import HfMaker
from tests.refusals import tree

Patch = Callable[[pytest.MonkeyPatch], None]
Tree = dict[str, bytes | str | None]


def refuses(code: int) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


def macos(patch: pytest.MonkeyPatch) -> None:
    """Make a system without what Linux alone has."""
    for name in ("copy_file_range", "fdatasync", "posix_fallocate", "sched_getaffinity", "sendfile"):
        patch.delattr(os, name, raising=False)
    patch.setattr(sys, "platform", "darwin")


def network(patch: pytest.MonkeyPatch) -> None:
    """Make a file system that cannot do more than read and write."""
    patch.setattr(os, "copy_file_range", refuses(errno.EOPNOTSUPP))
    patch.setattr(mapping, "fallocate", refuses(errno.EOPNOTSUPP))


def no_maps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mmap, "mmap", refuses(errno.ENODEV))


SYSTEMS: dict[str, Patch] = {"macOS": macos, "network": network, "no maps": no_maps}


# GPT-2 has transposed weights and fused ones, which are cut in columns; a cast and codes are written block by block.
WAYS: dict[str, dict[str, Any]] = {
    "torch_dist": {"tp": 2},
    "torch": {"to": "torch", "tp": 2, "checksums": False},
}


@pytest.fixture(scope="module")
def wanted(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    """The trees that the kernel's own copies make."""
    folder = tmp_path_factory.mktemp("wanted")
    made = {}
    for name, options in WAYS.items():
        convert(hf_checkpoint("gpt2"), folder / name / "DST", tokenizer="t", **options)
        convert(folder / name / "DST", folder / name / "BACK", to="hf")
        made[name] = tree(folder / name)
    return made


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bytes(
    system: str,
    way: str,
    wanted: dict[str, Tree],
    hf_checkpoint: HfMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = hf_checkpoint("gpt2")
    SYSTEMS[system](monkeypatch)
    maps: list[object] = []

    def mapped(fd: int) -> object:
        maps.append(mapping.mapped(fd))
        return maps[-1]

    monkeypatch.setattr("mcore_convert.storage.elements.mapped", mapped)
    convert(source, tmp_path / "DST", tokenizer="t", **WAYS[way])
    convert(tmp_path / "DST", tmp_path / "BACK", to="hf")
    assert maps
    assert not any(maps), "the plain path was not taken"
    assert of_a_tree(tree(tmp_path)) == of_a_tree(wanted[way])


def of_a_tree(files: Tree) -> Tree:
    """Return what does not name the place of the tree."""
    return {name: content for name, content in files.items() if name.endswith((".safetensors", ".distcp", ".pt"))}


@pytest.mark.parametrize("seed", range(20))
def test_scattered_is_the_inverse_of_gathered(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(map(int, random.integers(1, 6, random.integers(0, 4))))
    path = tmp_path / "x"
    before = random.integers(0, 255, 2 * int(np.prod(shape, dtype=int)) + 7, dtype=np.uint8)
    path.write_bytes(before.tobytes())
    view = View.of(path, 3, TensorMeta(shape, "bfloat16"))
    low = [int(random.integers(0, size)) for size in shape]
    box = Box(tuple(low), tuple(int(random.integers(1, size - at + 1)) for size, at in zip(shape, low, strict=True)))
    view = view.narrow(box)
    view = view.transposed if seed % 2 else view
    new = random.integers(0, 2**16, view.shape, dtype=np.uint16)
    fd = os.open(path, os.O_RDWR)
    try:
        scattered(fd, view, new)
        np.testing.assert_array_equal(gathered(fd, view), new)
    finally:
        os.close(fd)
    np.ndarray(view.shape, np.uint16, before.data, view.offset, view.strides)[...] = new
    assert path.read_bytes() == before.tobytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_room_is_kept_without_touching_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"content")
    os.truncate(path, 2**20)
    fd = os.open(path, os.O_RDWR)
    try:
        mapping.fallocate(fd, 2**20)
        assert os.fstat(fd).st_blocks * 512 >= 2**20
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            mapping.fallocate(-1, 2**20)
    finally:
        os.close(fd)
    assert path.read_bytes() == b"content".ljust(2**20, b"\0")


def test_a_full_disk_is_an_error_without_maps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(64))
    monkeypatch.setattr("mcore_convert.storage.elements.mapped", lambda fd: None)
    monkeypatch.setattr(os, "pwrite", refuses(errno.ENOSPC))
    view = View.of(path, 0, TensorMeta((4, 4), "float32"))
    with (
        Files() as files,
        pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
        files.target(view.transposed) as written,
    ):
        written[...] = 1
