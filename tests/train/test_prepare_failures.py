"""Preparing data: what is refused, and what kills and signals leave behind."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fixtures.tokenizer import END, stories
from mcore_convert.errors import ConvertError, DataError, UnwritableTarget
from mcore_convert.storage.marker import unfinished_ones
from tests.kinds import ROOT
from tests.refusals import run, tree
from tests.train.test_data_prepare import jsonl
from train_entry.data import encode, sources
from train_entry.data.bin_idx import check_tokens, open_pair
from train_entry.data.prepare import prepare
from train_entry.data.sources import Reading
from train_entry.data.tokenizer import load_tokenizer

BAD = {
    "no JSON (Expecting value at column 10)": b'{"text": oops}',
    "a JSON list, not an object": b'["text"]',
    "no `text` among its keys (body, id)": b'{"body": "a", "id": 1}',
    "`text` is a int, not text": b'{"text": 3}',
    "byte 0xff is no UTF-8": b'{"text": "\xff"}',
    "half of a surrogate pair, which is no text": b'{"text": "\\ud83d"}',
    "nested too deeply": b'{"text": ' + b"[" * 200_000,
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_lines_are_named(problem: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By file and line, wherever chunks begin; and nothing is left behind."""
    monkeypatch.setattr(sources, "CHUNK", 300)
    good = jsonl(tmp_path / "a.jsonl", stories()[:6]).read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*good[:4], b"\n", BAD[problem], b"\n", *good[4:]]))
    before = tree(tmp_path)
    with pytest.raises(DataError) as refused:
        prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), tokenizer=str(folder), workers=2)
    (item,) = refused.value.items
    assert item.startswith(f"{tmp_path}/a.jsonl:6: {problem}: ")
    assert tree(tmp_path) == before


def test_bad_text_is_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.txt").write_bytes("fine\nfine\nna\u00efve\n".encode() + "na\u00efve\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:4: byte 0xef is no UTF-8"):
        prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"), tokenizer=str(folder))


def test_what_is_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    source = jsonl(tmp_path / "a.jsonl", stories()[:2])
    blank = jsonl(tmp_path / "blank.jsonl", ["", " "])
    parquet.write_table(pa.table({"n": [1], "text": [[1]]}), tmp_path / "a.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(source.read_bytes())[:-20])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "folder").mkdir()
    endless = tmp_path / "endless.txt"
    endless.write_text("word " * 1000)
    monkeypatch.setattr(sources, "CHUNK", 100)
    monkeypatch.setattr(sources, "LONGEST", 4000)
    no_end = load_tokenizer(str(folder)).hf
    no_end.eos_token = None
    no_end.save_pretrained(tmp_path / "no-end")

    def refusal(*inputs: object, tokenizer: Path = folder, **options: Any) -> str:
        with pytest.raises(ConvertError) as refused:
            prepare(list(map(str, inputs)), str(tmp_path / "out"), tokenizer=str(tokenizer), **options)
        assert not list(tmp_path.glob("out*"))
        return str(refused.value).replace(f"{tmp_path}/", "")

    assert refusal("nothing.jsonl").startswith("`nothing.jsonl` does not exist")
    assert refusal(tmp_path / "folder").startswith("`folder` is a directory, and not one that")
    assert "nothing to load" not in refusal(source, tokenizer=tmp_path / "folder")
    assert refusal(source, tokenizer=tmp_path / "folder").startswith("`folder` has no tokenizer")
    assert refusal(source, tokenizer=tmp_path / "gone").startswith("`gone` does not exist")
    assert "no end of text to append\nhint: pass --no-append-eod" in refusal(source, tokenizer=tmp_path / "no-end")
    assert refusal(blank).startswith("there is not one document with text")
    assert "no column `story`, but `n`, `text`" in refusal(tmp_path / "a.parquet", reading=Reading(keys=("story",)))
    assert "`text` holds list<" in refusal(tmp_path / "a.parquet")
    assert refusal(tmp_path / "cut.parquet").startswith("`cut.parquet` cannot be read: ")
    assert refusal(tmp_path / "cut.jsonl.gz").startswith("`cut.jsonl.gz` cannot be read: ")
    assert "without an end of a document, from line 1 on" in refusal(endless, reading=Reading(separator=END))


def test_what_exists_is_not_replaced(tmp_path: Path, folder: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories()[:2])
    (tmp_path / "out_text_document.idx").write_text("mine")
    with pytest.raises(UnwritableTarget, match="the data exist") as refused:
        prepare([str(source)], str(tmp_path / "out"), tokenizer=str(folder))
    assert refused.value.items == (f"{tmp_path}/out_text_document.idx",)
    assert (tmp_path / "out_text_document.idx").read_text() == "mine"
    prepare([str(source)], str(tmp_path / "out"), tokenizer=str(folder), overwrite=True)
    assert open_pair(f"{tmp_path}/out_text_document").sequences == 2


def test_two_at_once(tmp_path: Path, folder: Path) -> None:
    """The second is refused, and does not disturb the first."""
    source = str(jsonl(tmp_path / "a.jsonl", stories()[:2]))
    refusals = []

    def meanwhile(progress: object) -> None:
        with pytest.raises(UnwritableTarget, match="is being written by another process") as refused:
            prepare([source], str(tmp_path / "out"), tokenizer=str(folder))
        refusals.append(refused)

    prepare([source], str(tmp_path / "out"), tokenizer=str(folder), progress=meanwhile)
    assert len(refusals) == 1
    assert open_pair(f"{tmp_path}/out_text_document").sequences == 2
    assert not list(tmp_path.glob("*.lock"))


def test_a_killed_process_ends_it(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel kills one when memory runs out."""

    def killed(chunk: object, encoding: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    source = str(jsonl(tmp_path / "a.jsonl", stories()[:2]))
    before = tree(tmp_path)
    monkeypatch.setattr(encode, "encode", killed)  # in the forked processes
    with pytest.raises(DataError, match="a process that tokenized was killed"):
        prepare([source], str(tmp_path / "out"), tokenizer=str(folder), workers=2)
    assert tree(tmp_path) == before


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that take seconds to prepare."""
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    jsonl(path, stories() * 2000)
    return path


@pytest.fixture
def long_run(
    tmp_path: Path, folder: Path, long_file: Path
) -> Iterator[Callable[[], tuple[subprocess.Popen[str], list[psutil.Process]]]]:
    """Starts a command with seconds of work, and returns when it has written something: the command, its processes."""
    shutil.copyfile(long_file, tmp_path / "one.jsonl")
    started: list[subprocess.Popen[str]] = []
    workers: list[psutil.Process] = []

    def start() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        words = ["data", "prepare", "one.jsonl", "out", "--tokenizer", str(folder), "--workers", "2"]
        command = subprocess.Popen(
            [sys.executable, "-m", "mcore_convert", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as on a terminal
        )
        started.append(command)
        written = tmp_path / "out_text_document.bin"
        deadline = time.monotonic() + 60
        while not any(partial.stat().st_size for partial in unfinished_ones(written)):
            assert time.monotonic() < deadline
            assert command.poll() is None
            time.sleep(0.02)
        workers.extend(psutil.Process(command.pid).children())
        assert len(workers) == 2
        return command, workers

    yield start
    for process in [*started, *(worker for worker in workers if worker.is_running())]:
        process.kill()
    for command in started:
        command.communicate()


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_leaves_nothing_behind(
    number: signal.Signals, to_all: bool, tmp_path: Path, long_run: Callable[[], Any]
) -> None:
    command, workers = long_run()
    (os.killpg if to_all else os.kill)(command.pid, number)
    _, messages = command.communicate(timeout=20)
    assert (command.returncode, messages) == (128 + number, "interrupted; nothing was left behind\n")
    assert [path.name for path in tmp_path.iterdir()] == ["one.jsonl"]
    assert not [worker for worker in workers if worker.is_running()]


def test_its_processes_end_with_it(tmp_path: Path, long_run: Callable[[], Any], folder: Path) -> None:
    """Even where it cannot tell them; and what it left is in nobody's way."""
    command, workers = long_run()
    command.kill()
    assert not psutil.wait_procs(workers, timeout=20)[1]
    assert not (tmp_path / "out_text_document.idx").exists()
    jsonl(tmp_path / "one.jsonl", stories())
    prepare([str(tmp_path / "one.jsonl")], str(tmp_path / "out"), tokenizer=str(folder))
    assert {path.name for path in tmp_path.iterdir()} == {
        "one.jsonl",
        *(f"out_text_document{suffix}" for suffix in (".bin", ".idx", ".json")),
    }


def test_the_summary(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n--\n\n--\ntwo")
    words = ("data", "prepare", tmp_path / "a.txt", tmp_path / "o", "--tokenizer", folder, "--separator", r"\n--\n")
    ended = run(*words)
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[0] == ["documents", "2", "1", "empty,", "left", "out"]
    assert lines[2][2:] == ["uint16,", "each", "document", "ends", "with", "0"]
    assert ended.out.splitlines()[-1] == f"written to {tmp_path}/o_text_document.bin and .idx"
    again = run(*words, "--json-keys", ",")
    assert again.code == 2


def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path, folder: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories()[:3])
    (prefix,) = prepare([str(source)], str(tmp_path / "o"), tokenizer=str(folder)).pairs
    binary, idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    whole = {file: file.read_bytes() for file in (binary, idx)}
    pair = open_pair(prefix)
    assert (pair.sequences, pair.tokens) == (3, len(whole[binary]) // 2)
    assert pair.lengths().sum() == pair.tokens
    size = len(whole[idx])

    def refusal(file: Path, content: bytes | None) -> str:
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(DataError) as refused:
            open_pair(prefix)
        file.write_bytes(whole[file])
        return str(refused.value).replace(f"{tmp_path}/", "")

    assert "o_text_document.idx is missing" in refusal(idx, None)
    assert "o_text_document.bin is missing" in refusal(binary, None)
    assert "`o_text_document.idx` does not fit `o_text_document.bin`" in refusal(binary, whole[binary][:-2])
    assert "does not fit" in refusal(binary, whole[binary] + b"\0\0")
    assert "is no index of Megatron's, or damaged" in refusal(idx, whole[idx][:20])
    assert "is no index of Megatron's, or damaged" in refusal(idx, b"x" * size)
    assert f"has {size - 8} bytes, and should have {size}" in refusal(idx, whole[idx][:-8])
    assert "version 1 and dtype code 6" in refusal(idx, whole[idx][:17] + b"\6" + whole[idx][18:])
    assert open_pair(prefix) == pair


@pytest.mark.parametrize("place", [0, 100_000, 299_999])
def test_tokens_beyond_the_vocabulary_are_refused(place: int, tmp_path: Path) -> None:
    """Looked for all over the file; the check is of a sample, so there are more of them here than one."""
    ids = np.ones(300_000, np.int32)
    ids[max(0, place - 50_000) : place + 1] = 400
    (tmp_path / "p.bin").write_bytes(ids.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 1, 2)
    (tmp_path / "p.idx").write_bytes(header + struct.pack("<iqqq", len(ids), 0, 0, 1))
    pair = open_pair(str(tmp_path / "p"))
    check_tokens(pair, 401)
    with pytest.raises(DataError, match="has the token 400, the model a vocabulary of 400"):
        check_tokens(pair, 400)
