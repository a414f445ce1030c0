"""Checkpoints in remote stores: the bytes of local conversions, headers alone where those do, and nothing half done."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import fsspec.config
import pytest

from mcore_convert import convert, export, inspect, reshard, verify, verify_files
from mcore_convert.conversion.ranks import Ranks
from mcore_convert.conversion.sent_files import ON_DISK, SentFiles
from mcore_convert.errors import ConvertError, UnreadableCheckpoint, UnwritableTarget
from mcore_convert.storage import asking
from mcore_convert.storage.marker import MARKER
from tests.conftest import HfMaker, real_checkpoint
from tests.refusals import golden_texts, run, tree
from tests.stores import Asked, Server, put, running_s3, tree_of

NAMES_ITS_PLACE = ("megatron_args.txt", "README.md")


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def server(s3: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setattr(asking, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "staging"))
    (tmp_path / "staging").mkdir()
    s3.requests.clear()
    yield s3
    s3.dropped, s3.refusal = lambda number: False, lambda asked: None
    assert not list((tmp_path / "staging").glob("mcore-convert-*"))


def left(staging: Path) -> list[Path]:
    return [path for path in staging.rglob("*") if path.is_file()]


numbers = itertools.count()


@pytest.fixture(params=["memory://tests", "s3://models"])
def store(request: pytest.FixtureRequest, server: Server) -> str:
    return f"{request.param}/{next(numbers)}"


@pytest.fixture
def memory(server: Server) -> str:
    return f"memory://tests/{next(numbers)}"


@pytest.fixture
def bucket(server: Server) -> str:
    return f"s3://models/{next(numbers)}"


def same(url: str, local: Path) -> None:
    """Assert that every file is there and no other, byte for byte, but for those that name their own place."""
    remote, here = tree_of(url), {name: content for name, content in tree(local).items() if content is not None}
    assert sorted(remote) == sorted(here)
    assert [name for name in here if remote[name] != here[name] and not name.endswith(NAMES_ITS_PLACE)] == []


def test_both_ways(store: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2")  # transposed tensors, and fused ones
    convert(source, tmp_path / "dist", tp=2, tokenizer="t")
    convert(source, f"{store}/dist", tp=2, tokenizer="t")
    same(f"{store}/dist", tmp_path / "dist")
    convert(tmp_path / "dist", tmp_path / "hf", max_shard_size=300_000)
    convert(f"{store}/dist", f"{store}/hf", max_shard_size=300_000)
    same(f"{store}/hf", tmp_path / "hf")
    assert verify(f"{store}/hf", source).equal
    assert verify_files(f"{store}/dist").intact


def test_reshard_and_export_of_a_run(store: str, tmp_path: Path) -> None:
    run_of = real_checkpoint("gpt2_tp2pp2")
    in_memory = store.startswith("memory:")
    if in_memory:  # hundreds of small tensors, each a request or two
        put(run_of, f"{store}/gpt2_tp2pp2")
    reshard(run_of, tmp_path / "moved", to="torch", tp=1, pp=2)
    reshard(f"{store}/gpt2_tp2pp2" if in_memory else run_of, f"{store}/moved", to="torch", tp=1, pp=2)
    same(f"{store}/moved", tmp_path / "moved")
    export(tmp_path / "moved", tmp_path / "model", with_tokenizer=False, dtype="bfloat16")
    export(f"{store}/moved", f"{store}/model", with_tokenizer=False, dtype="bfloat16")
    same(f"{store}/model", tmp_path / "model")


def test_inspect_reads_headers_only(server: Server, bucket: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2")
    put(source, f"{bucket}/hf")
    size = (source / "model.safetensors").stat().st_size
    server.requests.clear()
    assert inspect(f"{bucket}/hf").as_dict()["num_parameters"] == inspect(source).as_dict()["num_parameters"]
    fetched = sum(each.wanted for each in server.requests if each.path.endswith(".safetensors"))
    assert 0 < fetched < size / 10
    assert all(each.range for each in server.requests if each.method == "GET" and each.path.count("/") > 1)
    convert(source, f"{bucket}/dist", tp=2, tokenizer="t")
    server.requests.clear()
    assert inspect(f"{bucket}/dist").as_dict()["format"] == "torch_dist"
    assert not [each for each in server.requests if each.path.endswith(".distcp")]
    assert len(server.requests) < 20


def test_dropped_connections(server: Server, bucket: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2")
    convert(source, tmp_path / "dist", tp=2, tokenizer="t")
    server.dropped = lambda number: number % 20 == 0
    convert(source, f"{bucket}/dist", tp=2, tokenizer="t")
    same(f"{bucket}/dist", tmp_path / "dist")
    assert verify(f"{bucket}/dist", source).equal
    assert len(server.requests) > 40


def test_a_package_that_does_not_try_again(
    server: Server, hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's memory file system stands for one that leaves it to us."""
    kind = fsspec.get_filesystem_class("memory")
    calls = itertools.count(1)
    for name in ("_open", "ls", "pipe_file", "put_file"):
        real = getattr(kind, name)

        def failing(self: object, *words: object, real: Callable[..., object] = real, **options: object) -> object:
            if next(calls) % 20 == 0:
                raise ConnectionResetError("cut by the test")
            return real(self, *words, **options)

        monkeypatch.setattr(kind, name, failing)
    source, url = hf_checkpoint("gpt2"), f"memory://tests/{next(numbers)}"
    convert(source, tmp_path / "dist", tp=2, tokenizer="t")
    convert(source, url, tp=2, tokenizer="t")
    assert verify(url, source).equal
    monkeypatch.undo()
    assert next(calls) > 40
    same(url, tmp_path / "dist")


REFUSALS = {
    "InvalidAccessKeyId": "set the credentials for s3 as fsspec takes them",
    "AccessDenied": "set the credentials for s3 as fsspec takes them",
    "QuotaExceeded": "make room in the store",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_store_that_refuses(code: str, server: Server, bucket: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", tokenizer=False)
    sent: list[int] = []

    def refusal(asked: Asked) -> str | None:
        if code != "QuotaExceeded":
            return code
        sent.append(asked.nbytes if asked.method == "PUT" else 0)
        return code if sum(sent) > 600_000 and asked.method == "PUT" else None

    server.refusal = refusal
    with pytest.raises(ConvertError, match=bucket) as refused:
        export(source, f"{bucket}/hf", with_tokenizer=False, max_shard_size=200_000)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith(REFUSALS[code])
    assert len(server.requests) < 60
    server.refusal = lambda asked: None
    assert tree_of(bucket) == {}
    if code == "AccessDenied":
        put(source, f"{bucket}/there")
        server.refusal = refusal
        with pytest.raises(UnreadableCheckpoint, match="cannot read") as refused:
            inspect(f"{bucket}/there")
        assert str(refused.value.hint).startswith(REFUSALS[code])


REFUSED = {
    "a bucket that is missing": ("convert", "SRC", "s3://absent-bucket/DST"),
    "all of a bucket as a destination": ("convert", "SRC", "s3://models"),
    "a remote destination that is there": ("convert", "SRC", "STORE/there"),
    "a remote destination to replace": ("convert", "SRC", "STORE/there", "--overwrite"),
    "a remote destination to go on with": ("convert", "SRC", "STORE/new", "--resume"),
    "the Hub as a destination": ("convert", "SRC", "hf://ada/model"),
    "a remote source that is missing": ("convert", "STORE/none", "DST"),
    "a remote destination that is being written": ("convert", "SRC", "STORE/partial"),
    "a remote source that is being written": ("inspect", "STORE/partial"),
    "a model to run in a remote store": ("verify", "SRC", "STORE/there", "--logits"),
    "a remote model for the Hub": ("push", "STORE/there", "ada/model"),
    "a remote run to watch": ("export", "STORE/there", "--all"),
    "a store that is not known": ("inspect", "nosuch://models/run"),
}


@pytest.fixture(scope="module")
def refused(s3: Server, hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of the commands prints."""
    source, folder = hf_checkpoint("gpt2", tokenizer=False), tmp_path_factory.mktemp("refused")
    store = "s3://models/refused"
    put(source, f"{store}/there")
    fsspec.filesystem("s3").pipe_file(f"{store}/partial/{MARKER}", b"{}")
    texts = {}
    for title, words in REFUSED.items():
        places = {"SRC": str(source), "DST": str(folder / "DST")}
        ended = run(*(places.get(word, word.replace("STORE", store)) for word in words))
        assert (ended.code, ended.out) == (1 if words[0] != "verify" else 2, ""), (title, ended)
        texts[title] = ended.err.replace(str(source), "SRC")
    assert not list(folder.iterdir())
    same(f"{store}/there", source)
    return texts


@pytest.mark.parametrize("title", REFUSED)
def test_what_cannot_be_done(title: str, refused: dict[str, str]) -> None:
    assert refused[title] == golden_texts("remote_refusals.txt")[title]


def test_what_a_killed_run_left(memory: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", tokenizer=False)
    convert(source, f"{memory}/dist", tokenizer="t")
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"{memory}/dist/{MARKER}", b"{}")
    fs.pipe_file(f"{memory}/dist/of-the-killed", b"x")
    for refused in (
        lambda: inspect(f"{memory}/dist"),
        lambda: convert(f"{memory}/dist", tmp_path / "DST"),
        lambda: verify(source, f"{memory}/dist"),
        lambda: convert(source, f"{memory}/dist", tokenizer="t"),
    ):
        with pytest.raises(ConvertError, match="is not whole: a conversion writes it, or was killed"):
            refused()
    convert(source, f"{memory}/dist", tokenizer="t", overwrite=True)
    convert(source, tmp_path / "dist", tokenizer="t")
    same(f"{memory}/dist", tmp_path / "dist")


DECIDING = [".metadata", "latest_checkpointed_iteration.txt", "mcore_convert.json"]


def test_the_order_and_the_room(
    memory: str, hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes a checkpoint of files comes last, and few files are on this machine at any time."""
    on_disk: list[int] = []
    sent: list[str] = []
    real = SentFiles.send

    def send(self: SentFiles, path: Path) -> None:
        files = left(tmp_path / "staging")
        on_disk.append(sum(file.stat().st_blocks * 512 > 2**16 for file in files if file.suffix == ".safetensors"))
        sent.append(path.name)
        real(self, path)

    monkeypatch.setattr(SentFiles, "send", send)
    convert(hf_checkpoint("gpt2"), f"{memory}/dist", tp=2, tokenizer="t")
    assert sent[0].endswith(".distcp")
    assert [name for name in sent if name in DECIDING] == DECIDING
    assert sent[-2:] == DECIDING[1:]
    convert(f"{memory}/dist", f"{memory}/hf", max_shard_size=150_000)
    assert len([name for name in tree_of(f"{memory}/hf") if name.endswith(".safetensors")]) > 2 * ON_DISK
    assert 0 < max(on_disk) <= ON_DISK


def test_a_failure_removes_what_was_sent(memory: str, hf_checkpoint: HfMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []

    def fail(*_: object) -> None:
        there.extend(tree_of(memory))
        raise UnwritableTarget("the test ends it")

    monkeypatch.setattr("mcore_convert.conversion.execute.check_reopened", fail)
    with pytest.raises(UnwritableTarget, match="the test ends it"):
        convert(hf_checkpoint("gpt2"), f"{memory}/dist", tokenizer="t")
    assert {"dist/release/.metadata", f"dist/{MARKER}"} <= {*there}
    assert tree_of(memory) == {}


def test_a_source_that_changes(memory: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", tokenizer=False)
    put(source, f"{memory}/hf")
    content = (source / "model.safetensors").read_bytes()
    fs = fsspec.filesystem("memory")
    with pytest.raises(UnreadableCheckpoint, match="the source has changed since it was opened") as refused:
        convert(
            f"{memory}/hf",
            tmp_path / "DST",
            progress=lambda *_: fs.pipe_file(f"{memory}/hf/model.safetensors", content),
        )
    assert refused.value.items == (f"{memory}/hf/model.safetensors",)
    assert not (tmp_path / "DST").exists()


def test_several_processes_do_not_write_to_a_store(
    memory: str, hf_checkpoint: HfMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_convert.conversion.execute.current", lambda: Ranks(1, 2))
    with pytest.raises(UnwritableTarget, match="is in a remote store, and is written by one process"):
        convert(hf_checkpoint("gpt2", tokenizer=False), f"{memory}/dist")
