"""Substitutes of source files, and how much of them is read: an error with a name, at once."""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_convert.errors import ConfigError, UnreadableCheckpoint
from mcore_convert.formats.files import safetensors
from mcore_convert.formats.files.json_file import COSTS, cost_of, parsed, read_json
from mcore_convert.formats.files.torch_archive import MAX_RECORD, TorchFile
from mcore_convert.formats.megatron.run_directory import parse_tracker
from mcore_convert.storage.sources import MEMORY, Limit, Unfit, content_of, open_file
from tests.conftest import HfMaker
from tests.kinds import ROOT
from tests.refusals import refusal, run
from train_entry.config.files import read as read_run_file

OPENERS = {"open", "read_bytes", "read_text", "fromfile", "memmap", "copyfile", "copy", "copy2", "copytree", "mmap"}
# Files that may: those that this module guards, what is written and read back, and what belongs to the package.
MAY_OPEN = {
    "mcore_convert/storage/sources.py",
    "mcore_convert/storage/disk.py",  # makes files, and waits for what it made
    "mcore_convert/storage/locking.py",  # locks
    "mcore_convert/storage/marker.py",  # markers
    "mcore_convert/storage/elements.py",  # opens what is written
    "mcore_convert/storage/mapping.py",  # maps it
    "mcore_convert/storage/ranges.py",  # opens files of remote stores
    "mcore_convert/publishing/card.py",  # a template of the package
    "mcore_convert/inspection/page/render.py",  # templates of the package
    "mcore_convert/__main__.py",  # /dev/null
    "mcore_convert/cli/__init__.py",  # /dev/null
}


def openings(file: Path) -> list[str]:
    """Return the calls in a module that may open a file."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    result = []
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name in OPENERS and owner not in ("kind", "webbrowser", "copy") and not (name == "copy" and not owner):
            result.append(f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call.func)}")
    return result


def test_one_place_opens_sources() -> None:
    files = sorted((ROOT / "mcore_convert").rglob("*.py"))
    assert [each for file in files if str(file.relative_to(ROOT)) not in MAY_OPEN for each in openings(file)] == []
    assert openings(ROOT / "mcore_convert" / "storage" / "sources.py"), "it would not be seen"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("make", "name"), [(pipe, "named pipe"), (bound_socket, "socket"), (device, "device")])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(Unfit, match=f"it is a {name}, where a file should be"):
        open_file(tmp_path / "x")
    for read in (read_json, safetensors.read, TorchFile):
        with pytest.raises(UnreadableCheckpoint, match=f"cannot read `{tmp_path}/x`: it is a {name}"):
            read(tmp_path / "x")


@pytest.mark.parametrize("make", [pipe, device], ids=["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_directory_with_a_pipe(
    name: str, make: Callable[[Path], None], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(hf_checkpoint("gpt2", tokenizer=False), tmp_path / "SRC"))
    (source / name).unlink(missing_ok=True)
    make(source / name)
    if name in ("config.json", "model.safetensors"):
        assert refusal(source).startswith("error: ")
    else:  # what is no file does not travel with a model
        assert run("convert", source, tmp_path / "DST").code == 0
        assert not os.path.lexists(tmp_path / "DST" / name)


@pytest.mark.parametrize("limit", Limit)
def test_a_file_beyond_its_limit_is_not_read(limit: Limit, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.touch()
    os.truncate(file, limit.nbytes + 1)
    tracemalloc.start()
    try:
        with pytest.raises(Unfit, match=rf"it has {limit.nbytes + 1:,} bytes, and a .* at most {limit.nbytes:,}"):
            content_of(file, limit)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    os.truncate(file, 3)
    assert content_of(file, limit) == bytes(3)


def test_each_reader_has_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.touch()
    os.truncate(file, 2**40)
    for read in (read_json, parse_tracker):
        with pytest.raises((UnreadableCheckpoint, OSError), match="it has 1,099,511,627,776 bytes"):
            read(file)
    with pytest.raises(ConfigError, match="it has 1,099,511,627,776 bytes"):
        read_run_file(file)


SHAPES = {
    "empty lists": b"[" + b"[]," * 300 + b"[]]",
    "empty objects": b"[" + b"{}," * 300 + b"{}]",
    "deep": b'{"a":' * 90 + b"1" + b"}" * 90,
    "numbers": b"[" + b"100000," * 300 + b"1]",
    "floats": b"[" + b"1.5," * 300 + b"1]",
    "names": b"{" + b",".join(b'"%d":"x%d"' % (n, n) for n in range(1000)) + b"}",
    "objects of one": b"[" + b'{"a":1000},' * 300 + b"1]",
    "lists of one": b"[" + b"[1000]," * 300 + b"1]",
    "wide text": '["😀'.encode() + b"a" * 3000 + b'"]',
    "headers": b"{" + b'"a":{"dtype":"F32","shape":[9999,9999],"data_offsets":[10000,20000]},' * 300 + b'"b":1}',
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_memory_of_json_is_bounded_from_above(shape: str) -> None:
    content = SHAPES[shape]
    parsed(content)  # what is made once
    tracemalloc.start()
    try:
        value = parsed(content)
        assert tracemalloc.get_traced_memory()[1] < cost_of(content)
    finally:
        tracemalloc.stop()
    assert value


@pytest.mark.slow
@pytest.mark.parametrize("part", [b"[],", b"{},", b"1,", b'"a":1,', b'{"a":{}},'])
def test_json_that_would_take_too_much(part: bytes, tmp_path: Path) -> None:
    count = 90_000_000 // len(part) if part == b"1," else 30_000_000 // len(part)
    content = part * count
    with pytest.raises(ValueError, match=r"it would take up to [\d,]+ bytes of memory"):
        parsed(content)
    header = content[: Limit.JSON.nbytes]
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UnreadableCheckpoint, match=r"it would take up to [\d,]+ bytes of memory"):
        safetensors.read(tmp_path / "x")


def test_an_index_and_a_vocabulary_as_large_as_those_in_use_are_read() -> None:
    name = '"model.layers.60.mlp.experts.%d.gate_proj.weight_scale_inv":"model-00001-of-00163.safetensors"'
    names = (name % number for number in range(150_000))
    assert len(parsed(("{" + ",".join(names) + "}").encode())) == 150_000
    assert sum(COSTS.values()) * 2**20 < MEMORY  # with a million of each


def test_an_index_of_too_many_files(tmp_path: Path, hf_checkpoint: HfMaker) -> None:
    source = Path(shutil.copytree(hf_checkpoint("gpt2", tokenizer=False), tmp_path / "SRC"))
    (source / "model.safetensors").unlink()
    weight_map = {f"w{n}": f"{n}.safetensors" for n in range(100_001)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "names 100,001 files" in refusal(source)


def test_an_archive_that_claims_much(tmp_path: Path) -> None:
    """The directory of a zip file says how large it is, and each record: no room is made for that."""
    file = tmp_path / "x.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}.")
    whole = file.read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    tracemalloc.start()
    try:
        for size, start in ((2**31, 0), (100, 2**31), (2**32 - 2, 2**32 - 2)):
            file.write_bytes(whole[: end + 10] + struct.pack("<HLL", 1, size, start) + whole[end + 20 :])
            with pytest.raises(UnreadableCheckpoint):
                TorchFile(file)
        record = whole.index(b"PK\x01\x02")
        claimed = whole[: record + 20] + struct.pack("<LL", 2**31, 2**31) + whole[record + 28 :]
        file.write_bytes(claimed)
        with pytest.raises(UnreadableCheckpoint, match=r"has 2,147,483,648 bytes"):
            TorchFile(file)
        assert tracemalloc.get_traced_memory()[1] < 2**22
        assert MAX_RECORD < 2**31
    finally:
        tracemalloc.stop()


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{here}: &{here} [{', '.join([f'*{before}'] * 9)}]\n" for before, here in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "with its aliases it has more than"),
        ("a: &a [*a]\n", "with its aliases it has more than"),
        ("[" * 5000, "nested too deeply"),
    ],
    ids=["many", "endless", "deep"],
)  # fmt: skip
def test_a_run_file_is_no_larger_than_it_looks(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_run_file(tmp_path / "x.yaml")
    assert sys.getrecursionlimit() < 5000
