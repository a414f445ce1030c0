"""`mcore-convert data prepare`: what it writes is what Megatron Core's own builder writes and its reader reads."""

from __future__ import annotations

import gzip
import json
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

from fixtures.tokenizer import END, make_tokenizer, stories
from mcore_convert.errors import ConvertError, DataError, UnwritableTarget
from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.storage.marker import new_id, unfinished_ones
from tests.kinds import ROOT
from tests.refusals import run, tree
from train_entry.data import encode, sources
from train_entry.data.bin_idx import PairWriter, check_tokens, dtype_for, open_pair
from train_entry.data.chunks import Plain
from train_entry.data.encode import AHEAD, Encoding, encode_all
from train_entry.data.prepare import prepare
from train_entry.data.sidecar import sidecar_of
from train_entry.data.sources import Reading
from train_entry.data.tokenizer import Tokenizer, load_tokenizer

# Line ends that JSON and `str.splitlines` take for none and for one, characters of one to four bytes, a special token.
TEXTS = [
    *stories()[:8],
    "",
    "naïve\u2028 “quotes” 漢字 🦆",
    "  ",
    f"before{END}after",
    "tab\tand\r\nlines\n\nin it",
    "x",
]
FULL = [text for text in TEXTS if text.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny", 400)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


def jsonl(path: Path, texts: list[str], **more: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in texts))
    return path


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The oracle: transformers, one text at a time, and the end of text behind each."""
    return [[*tokenizer.hf(text).input_ids, tokenizer.hf.eos_token_id] for text in texts]


def by_megatron(prefix: Path, documents: list[list[int]], vocab_size: int) -> tuple[bytes, bytes]:
    """The files that Megatron Core's builder writes of these documents."""
    import_megatron()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(get_idx_path(str(prefix)))
    return files_of(str(prefix))


def files_of(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_the_files_are_those_of_megatron(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    done = prepare([str(jsonl(tmp_path / "a.jsonl", TEXTS))], str(tmp_path / "out"), tokenizer=str(folder), workers=2)
    prefix = f"{tmp_path}/out_text_document"
    documents = ids_of(tokenizer, FULL)
    assert files_of(prefix) == by_megatron(tmp_path / "megatron", documents, tokenizer.vocab_size)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    read = IndexedDataset(prefix)
    assert [document.tolist() for document in read] == documents
    assert read.index.dtype is np.uint16
    pair = done.pairs[prefix]
    assert pair == sidecar_of(prefix)
    assert (pair.documents, pair.empty, pair.tokens) == (len(FULL), 2, sum(map(len, documents)))
    assert pair.text_bytes == sum(len(text.encode()) for text in FULL)
    assert (pair.tokenizer, pair.fingerprint, pair.eod) == (str(folder), tokenizer.fingerprint, 0)
    assert {path.name for path in tmp_path.glob("out*")} == {f"out_text_document{s}" for s in (".bin", ".idx", ".json")}


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_large_vocabularies_take_four_bytes(tmp_path: Path, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in blocks smaller than the index, as that of many documents is."""
    monkeypatch.setattr("train_entry.data.bin_idx.BLOCK", 3)
    documents = [[1, 2, vocab_size - 1], [4], [5, 6], [7] * 9, [8, 8], [0], [3]]
    writer = PairWriter(str(tmp_path / "ours"), dtype_for(vocab_size), new_id())
    for some in (documents[:2], documents[2:]):
        ids = np.array([each for document in some for each in document], dtype_for(vocab_size))
        writer.add(ids, np.array([len(document) for document in some], np.int32))
    writer.complete()
    writer.publish()
    assert files_of(str(tmp_path / "ours")) == by_megatron(tmp_path / "theirs", documents, vocab_size)


def test_every_source_gives_the_same(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    texts = stories()
    table = pa.table({"other": list(range(len(texts))), "story": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    plain = jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]))
    (tmp_path / "a.jsonl.zst").write_bytes(pa.Codec("zstd").compress(plain, asbytes=True))
    (tmp_path / "a.txt").write_text(f"\ufeff{texts[0]}" + "".join(f"\n{END}\n{text}" for text in texts[1:]))
    (tmp_path / "lines").write_text("\n".join(texts) + "\n")
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(f"\n{text}\n")
    ways: dict[str, tuple[list[Path], Reading]] = {
        "jsonl": ([tmp_path / "a.jsonl"], Reading()),
        "gzip": ([tmp_path / "a.json.gz"], Reading()),
        "zstd": ([tmp_path / "a.jsonl.zst"], Reading()),
        "separator": ([tmp_path / "a.txt"], Reading(separator=END)),
        "lines": ([tmp_path / "lines"], Reading()),
        "files": ([tmp_path / f"{number:02}.txt" for number in range(len(texts))], Reading(document="file")),
        "parquet": ([tmp_path / "a.parquet"], Reading(keys=("story",))),
        "datasets": ([tmp_path / "saved"], Reading(keys=("story",))),
    }
    expected = by_megatron(tmp_path / "megatron", ids_of(tokenizer, texts), tokenizer.vocab_size)
    for name, (paths, reading) in ways.items():
        done = prepare(list(map(str, paths)), f"{tmp_path}/{name}", tokenizer=str(folder), reading=reading, workers=1)
        (prefix,) = done.pairs
        assert files_of(prefix) == expected, name
        assert done.pairs[prefix].empty == 0, name


def test_a_data_set_by_name(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    """A folder of files is a name for `datasets` too, and needs no network."""
    (tmp_path / "named").mkdir()
    jsonl(tmp_path / "named" / "train.jsonl", stories()[:3])
    jsonl(tmp_path / "named" / "test.jsonl", stories()[3:5])
    for split, texts in (("", stories()[:3]), (":test", stories()[3:5]), (":train[1:]", stories()[1:3])):
        name = f"datasets:{tmp_path}/named{split}"
        (prefix,) = prepare([name], str(tmp_path / "out"), tokenizer=str(folder), workers=1, overwrite=True).pairs
        assert files_of(prefix) == by_megatron(tmp_path / "m", ids_of(tokenizer, texts), tokenizer.vocab_size), name
    with pytest.raises(DataError, match=r"`datasets:.*:dev` cannot be loaded: .*Unknown split"):
        prepare([f"datasets:{tmp_path}/named:dev"], str(tmp_path / "out2"), tokenizer=str(folder))


def test_any_number_of_workers_gives_the_same(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few lines, and lines of several chunks."""
    monkeypatch.setattr(sources, "CHUNK", 1000)
    two = [str(jsonl(tmp_path / "a.jsonl", stories() * 2)), str(jsonl(tmp_path / "b.jsonl", TEXTS))]
    written = []
    for workers in (1, 3):
        progress: list[Any] = []
        done = prepare(two, f"{tmp_path}/{workers}", tokenizer=str(folder), workers=workers, progress=progress.append)
        (prefix,) = done.pairs
        written.append(files_of(prefix))
        total = sum(Path(file).stat().st_size for file in two)
        assert (progress[-1].read, progress[-1].total) == (total, total)
        assert [each.read for each in progress] == sorted(each.read for each in progress)
        assert (progress[-1].documents, progress[-1].tokens) == (
            done.pairs[prefix].documents,
            done.pairs[prefix].tokens,
        )
    assert written[0] == written[1]


@pytest.mark.parametrize("size", [3, 4, 5, 11, 1000])
def test_blocks_may_end_anywhere(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a separator or a character; the mark that some editors put first is no text."""
    monkeypatch.setattr(sources, "CHUNK", size)
    (tmp_path / "a.txt").write_text("\ufeffné\n<|>\n<|<|>\n\n🦆 b<|>c\n<|>\n", newline="")
    reading = Reading(separator="<|>")
    found = [
        (chunk.line, text)
        for chunk in sources.chunks(sources.source_of(str(tmp_path / "a.txt"), reading), reading)
        if isinstance(chunk, Plain)
        for [text] in chunk.documents(("text",))
    ]
    assert [text for _, text in found] == ["né", "<|", "🦆 b", "c"]
    if size < 5:
        assert [line for line, _ in found] == [1, 2, 3, 5]  # where a block begins


def test_little_is_read_ahead(tokenizer: Tokenizer) -> None:
    """Memory does not grow with the input: chunks are taken as they are written."""
    taken = []

    def source() -> Iterator[Plain]:
        for number in range(40):
            taken.append(number)
            yield Plain("f", 1, number, b"some text", b"")

    written = 0
    for _ in encode_all(source(), Encoding(tokenizer, ("text",), True, True), workers=2):
        assert len(taken) - written <= 2 * AHEAD
        written += 1
    assert written == 40


def test_several_keys(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    lines = [{"text": "one", "title": "A"}, {"text": "", "title": "B"}, {"text": "three", "title": None}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    ended = run(
        "data",
        "prepare",
        tmp_path / "a.jsonl",
        tmp_path / "out",
        "--tokenizer",
        folder,
        "--json-keys",
        "text,title",
        "--json",
    )
    assert ended.code == 0
    pairs = json.loads(ended.out)["pairs"]
    for key, texts in {"text": ["one", "three"], "title": ["A", "B"]}.items():
        prefix = f"{tmp_path}/out_{key}_document"
        assert files_of(prefix) == by_megatron(tmp_path / key, ids_of(tokenizer, texts), tokenizer.vocab_size)
        assert (pairs[prefix]["documents"], pairs[prefix]["empty"]) == (2, 1)


def test_special_tokens(tmp_path: Path, folder: Path) -> None:
    """A tokenizer of Llama's kind puts a BOS before a text; one that puts the end behind it too gets no second end."""
    from tokenizers.processors import TemplateProcessing

    ids = {}
    for name, template in {"bos": "<|user|> $A", "both": f"<|user|> $A {END}"}.items():
        hf = load_tokenizer(str(folder)).hf
        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[(END, 0), ("<|user|>", 1)]
        )
        hf.save_pretrained(tmp_path / name)
        for options in ({}, {"special_tokens": False}, {"append_eod": False}):
            source = str(jsonl(tmp_path / "a.jsonl", ["x"]))
            done = prepare([source], str(tmp_path / "o"), tokenizer=str(tmp_path / name), overwrite=True, **options)  # type: ignore[arg-type]
            (prefix,) = done.pairs
            ids[name, *options] = np.fromfile(f"{prefix}.bin", np.uint16).tolist()
    x = load_tokenizer(str(folder)).hf("x").input_ids
    assert ids == {
        ("bos",): [1, *x, 0],
        ("bos", "special_tokens"): [*x, 0],
        ("bos", "append_eod"): [1, *x],
        ("both",): [1, *x, 0],
        ("both", "special_tokens"): [*x, 0],
        ("both", "append_eod"): [1, *x, 0],
    }


def test_tokenizers_written_in_python(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """They give lists, and know nothing of the Rust library."""
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}')
    slow = load_tokenizer(str(tmp_path / "bytes"))
    assert not slow.hf.is_fast
    source = jsonl(tmp_path / "a.jsonl", ["ab", "é"])
    (prefix,) = prepare([str(source)], str(tmp_path / "o"), tokenizer=str(tmp_path / "bytes"), workers=1).pairs
    expected = [each + 3 for each in b"ab"], [each + 3 for each in "é".encode()]  # after pad, end and unk
    assert np.fromfile(f"{prefix}.bin", np.uint16).tolist() == [*expected[0], 1, *expected[1], 1]


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
    _, said = command.communicate(timeout=20)
    assert (command.returncode, said) == (128 + number, "interrupted; nothing was left behind\n")
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
