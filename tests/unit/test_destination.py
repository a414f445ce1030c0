"""The destination: made whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_convert import convert, verify
from mcore_convert.errors import UnwritableTarget
from mcore_convert.storage.destination import claimed, partial_path
from tests.conftest import HfMaker
from tests.refusals import refusal, run, tree

EXISTS = "error: `DST` exists\nhint: choose another destination, or pass --overwrite\n"
BIG = 2**29  # bytes of a source that takes long enough to be interrupted; a hole on the disk


@pytest.fixture
def source(tmp_path: Path, hf_checkpoint: HfMaker) -> Path:
    made = hf_checkpoint("llama-gqa", tokenizer=False, config={"num_hidden_layers": 2})
    return Path(shutil.copytree(made, tmp_path / "SRC"))


@pytest.fixture
def big(tmp_path: Path, source: Path) -> Path:
    """A Llama of half a gigabyte of zeros, which take no room."""
    path = Path(shutil.copytree(source, tmp_path / "BIG"))
    config = json.loads((path / "config.json").read_text())
    rows = BIG // 4 // config["hidden_size"] // 2 // 128 * 128
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    file = path / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    at = 0
    for name, entry in header.items():
        if name != "__metadata__":
            if name in ("lm_head.weight", "model.embed_tokens.weight"):
                entry["shape"][0] = rows
            size = 4 * entry["shape"][0] * (entry["shape"] + [1])[1]
            entry["data_offsets"] = [at, at + size]
            at += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with file.open("r+b") as opened:
        opened.truncate(8 + len(text) + at)
    return path


def started(source: Path, destination: Path, *options: str, limits: str = "") -> subprocess.Popen[str]:
    """Return a conversion in a process of its own; `limits` are statements that run before it."""
    code = f"import resource, sys; from mcore_convert.cli import main; {limits}\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", code, "convert", str(source), str(destination), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def writing(process: subprocess.Popen[str], destination: Path) -> None:
    """Wait until the conversion writes."""
    deadline = time.monotonic() + 30
    while not partial_path(destination).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def a_file(path: Path) -> None:
    path.write_text("mine")


def an_empty_directory(path: Path) -> None:
    path.mkdir()


def a_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


THERE = [a_file, an_empty_directory, a_full_directory, a_dangling_link]


@pytest.mark.parametrize("make", THERE)
def test_a_destination_that_exists_is_kept(make: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    make(tmp_path / "DST")
    assert refusal(source) == EXISTS


@pytest.mark.parametrize("make", THERE)
def test_overwrite_replaces_it_whole(make: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    make(tmp_path / "DST")
    convert(source, tmp_path / "fresh", tokenizer="t")
    assert run("convert", source, tmp_path / "DST", "--overwrite", "--tokenizer", "t").code == 0
    names = [set(tree(tmp_path / name)) for name in ("fresh", "DST")]
    assert names[0] == names[1]
    assert verify(source, tmp_path / "DST").equal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DST", "SRC", "fresh"]


@pytest.mark.parametrize("make", THERE)
def test_overwrite_keeps_the_old_one_when_it_fails(make: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    make(tmp_path / "DST")
    (source / "generation_config.json").unlink(missing_ok=True)
    (source / "model.safetensors").unlink()
    assert refusal(source, "--overwrite") == "error: `SRC` has a `config.json` but no weights\n"


@pytest.mark.parametrize("make", THERE)
def test_overwrite_keeps_the_old_one_when_it_is_interrupted(
    make: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    make(tmp_path / "DST")
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "DST", overwrite=True, progress=interrupt)
    assert tree(tmp_path) == before


def interrupt(done: int, total: int) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "new" / "directories" / "DST", progress=interrupt)
    assert tree(tmp_path) == before


def test_a_neighbour_named_old_is_not_ours(source: Path, tmp_path: Path) -> None:
    a_full_directory(tmp_path / "DST")
    a_full_directory(tmp_path / "DST.old")
    assert run("convert", source, tmp_path / "DST", "--overwrite").code == 0
    assert tree(tmp_path / "DST.old") == {"mine.txt": b"mine"}


@pytest.mark.parametrize("name", [".", "..", "/", ""])
@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--dry-run"]])
def test_a_destination_without_a_name_is_refused(name: str, options: list[str], source: Path) -> None:
    ended = run("convert", source, name, *options)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: `{name or '.'}` cannot be made or replaced\nhint: name the directory to make\n"


@pytest.mark.parametrize(
    ("destination", "shown"),
    [("SRC", "SRC"), ("SRC/DST", "SRC/DST"), ("SRC/a/b/DST", "SRC/a/b/DST"), ("link", "link/DST")],
)
def test_a_source_stays_as_it_is(destination: str, shown: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("SRC")
    to = tmp_path / destination / "DST" if destination == "link" else tmp_path / destination
    message = (
        f"error: `{shown}` and the source `SRC` lie in one another\nhint: choose a destination beside the source\n"
    )
    assert refusal(source, "--overwrite", to=to) == message


def test_a_source_inside_of_the_destination_is_not_deleted(source: Path, tmp_path: Path) -> None:
    (tmp_path / "DST").mkdir()
    inside = source.rename(tmp_path / "DST" / "SRC")
    before = tree(tmp_path)
    ended = run("convert", inside, tmp_path / "DST", "--overwrite")
    assert ended.code == 1
    assert "lie in one another" in ended.err
    assert tree(tmp_path) == before


def test_files_that_a_source_links_to_are_not_deleted(source: Path, tmp_path: Path) -> None:
    """A snapshot in the Hub's cache is a directory of links."""
    blobs = source.rename(tmp_path / "blobs")
    source.mkdir()
    for file in blobs.iterdir():
        (source / file.name).symlink_to(f"../blobs/{file.name}")
    assert "lie in one another" in refusal(source, "--overwrite", to=blobs)
    assert run("convert", source, tmp_path / "DST").code == 0
    assert run("convert", tmp_path / "DST", tmp_path / "back").code == 0
    assert verify(blobs, tmp_path / "back").equal
    assert not [path for path in (tmp_path / "back").rglob("*") if path.is_symlink()]


def test_a_destination_under_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = refusal(source, to=tmp_path / "file" / "DST")
    assert shown in ("error: cannot write `file`: File exists\n", "error: cannot write `file/DST`: Not a directory\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    shown = refusal(source, to=tmp_path / "locked" / "DST")
    assert shown == "error: cannot write `locked/DST.partial.lock`: Permission denied\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_source_that_cannot_be_read_is_refused(source: Path) -> None:
    (source / "model.safetensors").chmod(0)
    assert refusal(source) == "error: cannot read `SRC/model.safetensors`: Permission denied\n"


@pytest.mark.parametrize("destination", ["with space", "mit-Ümläuten-日本", "new/parents/DST", "relative/", "./dot"])
def test_names_and_relative_paths(
    destination: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moved = Path(source.name).rename("a source ✓")
    for file in moved.iterdir():
        file.chmod(0o400)
    moved.chmod(0o500)
    assert run("convert", moved, destination).code == 0
    assert run("convert", Path(destination), "back").code == 0
    assert verify("back", moved).equal


@contextlib.contextmanager
def small_disk(path: Path, size: str, *, unmount: str = "") -> Iterator[None]:
    """A disk of this size; `unmount` is the pattern of where it is at the end, from two directories above."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        places = list(path.parents[1].glob(unmount)) if unmount else [path]
        subprocess.run(["umount", *places], check=True)


@pytest.mark.slow
def test_a_disk_without_room_is_seen_beforehand(source: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "400k"):
        shown = refusal(source, to=tmp_path / "disk" / "DST")
    assert shown.startswith("error: `disk` has 409,600 bytes free, ")
    assert shown.endswith(" are needed\n")


@pytest.mark.slow
def test_a_disk_that_fills_up(source: Path, tmp_path: Path) -> None:
    """Someone else takes the room while the conversion runs."""

    def fill(done: int, total: int) -> None:
        with contextlib.suppress(OSError), (tmp_path / "disk" / "other").open("ab") as file:
            file.write(bytes(2**20))

    with small_disk(tmp_path / "disk", "1m"):
        with pytest.raises(UnwritableTarget, match=r"no room left in `.*disk`: No space left on device"):
            convert(source, tmp_path / "disk" / "DST", progress=fill)
        assert sorted(tree(tmp_path / "disk")) == ["other"]


@pytest.mark.parametrize("target", ["torch_dist", "hf"])
@pytest.mark.slow
def test_files_that_may_not_grow(target: str, source: Path, tmp_path: Path) -> None:
    limits = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    code, err = finished(started(source, tmp_path / "DST", "--to", target, limits=limits))
    assert (code, err.replace(str(tmp_path), "HERE")) == (1, "error: no room left in `HERE`: File too large\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SRC"]


@pytest.mark.slow
def test_more_files_than_may_be_open(source: Path, tmp_path: Path) -> None:
    assert run("convert", source, tmp_path / "many", "--to", "hf", "--max-shard-size", "1B").code == 0
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 21
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = f"resource.setrlimit(resource.RLIMIT_NOFILE, (16, {hard}))"
    assert finished(started(tmp_path / "many", tmp_path / "DST", "-q", limits=limits)) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.slow
def test_a_signal_leaves_nothing(number: signal.Signals, big: Path, tmp_path: Path) -> None:
    destination = tmp_path / "DST"
    process = started(big, destination)
    writing(process, destination)
    process.send_signal(number)
    assert finished(process) == (128 + number, "interrupted; nothing was left behind\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BIG", "SRC"]


@pytest.mark.slow
def test_what_a_killed_run_left_is_cleared_by_the_next(big: Path, source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "DST"
    process = started(big, destination)
    writing(process, destination)
    process.kill()
    process.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BIG", "DST.partial", "DST.partial.lock", "SRC"]
    assert run("convert", source, destination).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BIG", "DST", "SRC"]
    assert verify(source, destination).equal


def test_two_runs_do_not_write_into_one_another(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "DST"
    with claimed(destination, 0, overwrite=False):
        (partial_path(destination) / "theirs").touch()
        for _ in range(2):  # the first one must not take the lock away
            assert refusal(source) == "error: `DST.partial` is being written by another process\n"
    shutil.rmtree(partial_path(destination))
    assert run("convert", source, destination).code == 0


@pytest.mark.slow
def test_of_two_processes_one_writes(big: Path, tmp_path: Path) -> None:
    destination = tmp_path / "DST"
    ended = sorted(finished(process) for process in [started(big, destination, "-q") for _ in range(2)])
    assert ended[0] == (0, "")
    assert ended[1][0] == 1
    assert ended[1][1].replace(f"{tmp_path}/", "") in (
        "error: `DST.partial` is being written by another process\n",
        EXISTS,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BIG", "DST", "SRC"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.slow
def test_output_that_cannot_be_written(options: list[str], source: Path) -> None:
    code = "import sys; from mcore_convert.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "inspect", str(source), *options]
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (process.returncode, process.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.slow
def test_what_cannot_be_removed_is_reported(source: Path, tmp_path: Path) -> None:
    """A disk that is mounted in the old destination stays; the new one is whole."""
    (tmp_path / "DST").mkdir()
    with small_disk(tmp_path / "DST" / "disk", "100k", unmount="*.old-*/disk"):
        ended = run("convert", source, tmp_path / "DST", "--overwrite")
    (old,) = tmp_path.glob("DST.partial.old-*")
    assert ended.code == 1
    assert ended.err.replace(f"{tmp_path}/", "").splitlines()[-2:] == [
        "error: `DST` is complete, but what it has replaced cannot be removed: Device or resource busy",
        f"hint: remove `{old.name}`",
    ]
    assert verify(source, tmp_path / "DST").equal


@pytest.mark.slow
def test_a_reader_of_the_output_that_goes_away(source: Path) -> None:
    code = "import sys; from mcore_convert.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "inspect", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1
