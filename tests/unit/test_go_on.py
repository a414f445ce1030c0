"""A conversion that ended early goes on: what is complete stays as it is, and the end is the same to the last byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_convert import convert, export
from mcore_convert.conversion import beside, copying
from mcore_convert.conversion.plan import Copy
from mcore_convert.errors import UnwritableTarget
from mcore_convert.storage.destination import partial_path
from mcore_convert.storage.marker import JOURNAL, journals
from tests.conftest import HfMaker

TARGETS: list[dict[str, Any]] = [
    {"to": "torch_dist", "tp": 2, "max_shard_size": 150_000},
    {"to": "torch", "tp": 2, "pp": 2},
    {"to": "hf", "max_shard_size": 150_000},
    {"to": "torch", "tp": 2, "pp": 2, "checksums": False},
]


class Stop(Exception):
    """What ends a run early."""


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that were copied into each file, by its name."""
    counts: Counter[str] = Counter()
    original = beside.copy_together

    def counted(files: Any, group: Sequence[Copy], feed: Any = None) -> Iterator[int]:
        for copy in group:
            counts[copy.target.path.name] += copy.source.nbytes
        yield from original(files, group, feed)

    monkeypatch.setattr(copying, "copy_together", counted)
    return counts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ends_early(source: Path, destination: Path, share: float, **options: Any) -> None:
    """Convert, and end when a share of the bytes was copied."""

    def progress(done: int, total: int) -> None:
        if done > share * total:
            raise Stop

    with pytest.raises(Stop):
        convert(source, destination, progress=progress, workers=1, **options)


def identities(partial: Path) -> dict[str, tuple[int, int]]:
    """Return which files lie in a directory, so that one that was written again is told from one that was not."""
    return {
        str(path.relative_to(partial)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in partial.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("options", TARGETS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("share", [0.75, 0.9])
def test_goes_on_to_the_same_bytes(
    options: dict[str, Any], share: float, hf_checkpoint: HfMaker, tmp_path: Path, copied: Counter[str]
) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    destination = tmp_path / "out"
    convert(source, destination, workers=1, **options)
    whole, once = contents(destination), Counter(copied)
    destination.rename(tmp_path / "whole")
    copied.clear()
    ends_early(source, destination, share, **options, resume=True)
    partial = partial_path(destination)
    before = identities(partial)
    kept = {line for path in journals(partial) for line in path.read_text().splitlines() if line}
    assert kept, "no file was complete"
    first = Counter(copied)
    done = convert(source, destination, **options, resume=True)
    assert contents(destination) == whole
    assert f"{len(kept)} of {len(done.plan.reservation.sizes)} files were complete already" in done.notes
    again = {name for name in once if copied[name] > first[name]}
    after = identities(destination)
    stayed = {name for name in before if after.get(name) == before[name]}
    assert len(stayed) == len(kept)
    assert not {Path(name).name for name in stayed} & again or options["to"] == "torch"  # whose files have one name
    assert sum((copied - first).values()) == sum(
        size for path, size in planned(done).items() if str(path.relative_to(destination)) not in stayed
    )
    assert not partial.exists()
    assert not list(destination.rglob(f"{JOURNAL}*"))


def planned(done: Any) -> Counter[Path]:
    """Return the bytes that a plan copies into each file."""
    sizes: Counter[Path] = Counter()
    for move in done.plan.moves:
        for copy in move.copies:
            sizes[copy.target.path] += copy.source.nbytes
    return sizes


def test_without_the_option_nothing_is_left(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    ends_early(source, tmp_path / "out", 0.9, to="torch", tp=2, pp=2)
    assert list(tmp_path.iterdir()) == []


def test_nothing_complete_leaves_nothing(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    ends_early(hf_checkpoint("llama-gqa", fill="normal"), tmp_path / "out", 0.0, to="torch_dist", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_is_cleared_with_a_word(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Another run without the option begins anew, and says that it need not have."""
    source = hf_checkpoint("llama-gqa", fill="normal")
    options: dict[str, Any] = {"to": "torch", "tp": 2, "pp": 2}
    ends_early(source, tmp_path / "out", 0.9, **options, resume=True)
    done = convert(source, tmp_path / "out", **options)
    assert any("--resume would have gone on" in note for note in done.notes)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change", ["options", "source"])
def test_work_for_another_plan_is_not_taken(change: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    sources = [hf_checkpoint("llama-gqa", fill="normal"), hf_checkpoint("llama-gqa", fill="normal", seed=7)]
    options: dict[str, Any] = {"to": "torch", "tp": 2, "pp": 2}
    ends_early(sources[0], tmp_path / "out", 0.9, **options, resume=True)
    source = sources[change == "source"]
    if change == "options":
        options["pp"] = 4
    done = convert(source, tmp_path / "out", **options, resume=True)
    assert any("of another source, other options or another version" in note for note in done.notes)
    written = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    convert(source, tmp_path / "out", **options)
    assert written == contents(tmp_path / "out")


def test_a_file_that_was_touched_is_written_again(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", fill="normal")
    options: dict[str, Any] = {"to": "hf", "max_shard_size": 150_000}
    convert(source, tmp_path / "whole", **options)
    ends_early(source, tmp_path / "out", 0.9, **options, resume=True)
    partial = partial_path(tmp_path / "out")
    file = min(partial.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    convert(source, tmp_path / "out", **options, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_no_room_leaves_what_is_complete(
    hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    source = hf_checkpoint("llama-gqa", fill="normal")
    options: dict[str, Any] = {"to": "hf", "max_shard_size": 150_000, "resume": True}
    original, written = os.pwrite, [0]

    def full(fd: int, content: Any, at: int) -> int:
        written[0] += len(content)
        if written[0] > 600_000 and len(content) > 4096:  # the journal's lines are short
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(fd, content, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UnwritableTarget, match="no room left"):
            convert(source, tmp_path / "out", **options)
    assert journals(partial_path(tmp_path / "out"))
    done = convert(source, tmp_path / "out", **options)
    assert any("files were complete already" in note for note in done.notes)


def test_an_export_goes_on(hf_checkpoint: HfMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(hf_checkpoint("llama-gqa", fill="normal"), tmp_path / "mcore", to="torch_dist")
    options: dict[str, Any] = {"max_shard_size": 150_000, "with_tokenizer": False, "workers": 1}
    export(tmp_path / "mcore", tmp_path / "hf", **options)
    whole = contents(tmp_path / "hf")
    (tmp_path / "hf").rename(tmp_path / "whole")

    def progress(done: int, total: int) -> None:
        if done > 0.4 * total:
            raise Stop

    with pytest.raises(Stop):
        export(tmp_path / "mcore", tmp_path / "hf", **options, resume=True, progress=progress)
    assert journals(partial_path(tmp_path / "hf"))
    export(tmp_path / "mcore", tmp_path / "hf", **options, resume=True)
    assert contents(tmp_path / "hf") == whole
