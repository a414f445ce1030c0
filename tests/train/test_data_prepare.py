"""`mcore-convert data prepare`: what it writes is what Megatron Core's own builder writes and its reader reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tokenizer import END, stories
from mcore_convert.errors import DataError
from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.storage.marker import new_id
from tests.refusals import run
from train_entry.data import sources
from train_entry.data.bin_idx import PairWriter, dtype_for
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


def jsonl(path: Path, texts: list[str], **more: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in texts))
    return path


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the oracle: transformers, one text at a time, and the end of text behind each."""
    return [[*tokenizer.hf(text).input_ids, tokenizer.hf.eos_token_id] for text in texts]


def by_megatron(prefix: Path, documents: list[list[int]], vocab_size: int) -> tuple[bytes, bytes]:
    """Return the files that Megatron Core's builder writes of these documents."""
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
    result = [
        (chunk.line, text)
        for chunk in sources.chunks(sources.source_of(str(tmp_path / "a.txt"), reading), reading)
        if isinstance(chunk, Plain)
        for [text] in chunk.documents(("text",))
    ]
    assert [text for _, text in result] == ["né", "<|", "🦆 b", "c"]
    if size < 5:
        assert [line for line, _ in result] == [1, 2, 3, 5]  # where a block begins


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
