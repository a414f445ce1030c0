"""The manifest of an output: what it says, how damage is named, and what is refused when such a directory is read."""

from __future__ import annotations

import json
import random
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mcore_convert import convert, reshard, verify_files
from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.checkpoints.manifest import MANIFEST, Manifest, manifest_lines, read_manifest, write_manifest
from mcore_convert.comparison.integrity import Damage
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage import digests
from tests.conftest import HfMaker
from tests.refusals import run

BLOCK = 4096
NAME = "dst"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tiny models have several blocks, and those several steps."""
    monkeypatch.setattr(digests, "BLOCK", BLOCK)
    monkeypatch.setattr("mcore_convert.checkpoints.manifest.BLOCK", BLOCK)
    monkeypatch.setattr(digests, "STEP", 1536)
    monkeypatch.setattr("mcore_convert.storage.elements.STEP", 1536)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fixtures.hf import make_hf

    return make_hf("llama-gqa", tmp_path_factory.mktemp("llama") / "hf")


Written = tuple[Path, Path]  # the source, and the directory that has the manifest


@pytest.fixture(params=["hf", "torch_dist", "torch"])
def written(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Written:
    """A directory in each format, cut for two ranks where it has ranks."""
    if request.param == "hf":
        convert(source, tmp_path / NAME, to="hf", max_shard_size=400_000)
        return source, tmp_path / NAME
    convert(source, tmp_path / NAME, to=request.param, tp=2, pp=2 if request.param == "torch" else 1)
    return source, tmp_path / NAME / "release"


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return content


def blocks(content: bytes) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]


def test_checksums_are_those_of_the_bytes(written: Written) -> None:
    """Each checksum again, from the files and in plain Python; every byte of every file is covered once."""
    _, folder = written
    content = content_of(folder)
    assert content["checksums"] == {"kind": "xxh3_64", "block": BLOCK}
    inside = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(content["files"]) == inside - {MANIFEST}
    covered: dict[str, set[tuple[int, int]]] = {name: set() for name in inside}
    for name, tensor in content["tensors"].items():
        for part in tensor["parts"]:
            start, end = part["bytes"]
            held = (folder / part["file"]).read_bytes()[start:end]
            assert part["sums"] == blocks(held), name
            size = int(np.prod(part.get("shape", tensor["shape"]))) * np.dtype(tensor["dtype"]).itemsize
            assert size == len(held), name
            covered[part["file"]].add((start, end))
    for name, entry in content["files"].items():
        held = (folder / name).read_bytes()
        rest = b""
        at = 0
        for start, end in sorted(covered[name]):
            assert at <= start
            rest, at = rest + held[at:start], end
        assert entry == {"size": len(held), "rest": xxhash.xxh3_64_hexdigest(rest + held[at:])}, name
    assert max(len(part["sums"]) for tensor in content["tensors"].values() for part in tensor["parts"]) > 1


def test_tensors_are_those_of_the_source(written: Written) -> None:
    """What is said of a tensor that is cut across its rows, and of one that is put together of three."""
    source, folder = written
    content = content_of(folder)
    tensors = load_file(source / "model.safetensors")
    assert content["source"] == {
        "name": "hf",
        "format": "hf",
        "files": {"model.safetensors": content["source"]["files"]["model.safetensors"]},
    }
    if content["format"] == "hf":
        assert content["tensors"].keys() == tensors.keys()
        assert all(entry["from"] == [name] for name, entry in content["tensors"].items())
        assert "headers" not in content or content["headers"] == {}
        return
    row = content["tensors"]["decoder.layers.1.self_attention.linear_proj.weight"]
    name = "model.layers.1.self_attn.o_proj.weight"
    assert (row["dtype"], row["shape"], row["from"]) == ("float32", list(tensors[name].shape), [name])
    for part in row["parts"]:
        (low, first), (rows, columns) = part["at"], part["shape"]
        wanted = tensors[name][low : low + rows, first : first + columns].tobytes()
        assert part["sums"] == blocks(wanted)
    packed = content["tensors"]["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert packed["from"] == [f"model.layers.1.self_attn.{x}_proj.weight" for x in "kqv"]


def test_two_runs_write_the_same(source: Path, tmp_path: Path) -> None:
    """No time and no path of a machine is in it."""
    contents = []
    for home in ("a", "b"):
        convert(source, tmp_path / home / NAME, to="hf")
        reshard_source = tmp_path / "ranks" / home
        convert(source, reshard_source, to="torch", tp=2)
        contents.append(
            [(tmp_path / home / NAME / MANIFEST).read_bytes(), (reshard_source / "release" / MANIFEST).read_bytes()]
        )
    assert contents[0][0] == contents[1][0]
    assert str(tmp_path).encode() not in contents[0][0] + contents[0][1]


def test_every_flipped_bit_is_named(written: Written) -> None:
    """The file, and in a tensor its name and the block; nothing else is said to be damaged."""
    _, folder = written
    manifest = read_manifest(folder / MANIFEST)
    assert manifest is not None
    assert verify_files(folder).intact
    draw = random.Random(0)
    wanted: set[tuple[str, str | None, int]] = set()
    for part in draw.sample(manifest.parts, 25):
        at = draw.randrange(part.start, part.end)
        flip(folder / part.file, at, draw.randrange(8))
        wanted.add((part.file, part.tensor, part.start + (at - part.start) // BLOCK * BLOCK))
    for name, file in manifest.files.items():
        free = [*digests.gaps_between(manifest.runs.get(name, ()), file.size)]
        flip(folder / name, draw.randrange(*draw.choice(free)), draw.randrange(8))
        wanted.add((name, None, free[0][0]))
    actual = verify_files(folder)
    assert not actual.intact
    assert {(damage.file, damage.tensor, damage.start) for damage in actual.damages} == wanted
    assert len(actual.damages) == len(wanted)
    assert all(damage.block == (damage.start - start_of(manifest, damage)) // BLOCK + 1 for damage in actual.damages)


def start_of(manifest: Manifest, damage: Damage) -> int:
    """Return where the part of a file begins that is damaged."""
    parts = (part for part in manifest.parts if part.file == damage.file and part.start <= damage.start < part.end)
    return next((part.start for part in parts), damage.start + BLOCK)


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_the_command_names_what_is_damaged(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / NAME, tp=2)
    folder = tmp_path / NAME / "release"
    done = run("verify", str(tmp_path / NAME))  # the directory of a run stands for its newest checkpoint
    assert (done.code, done.out.splitlines()[-1], done.err) == (0, "intact", "")
    manifest = read_manifest(folder / MANIFEST)
    assert manifest is not None
    part = next(part for part in manifest.parts if "layers.2.mlp.linear_fc2" in part.tensor and len(part.sums) > 2)
    flip(folder / part.file, part.start + 2 * BLOCK, 3)
    (folder / "common.pt").unlink()
    with (folder / "metadata.json").open("ab") as file:
        file.write(b" ")
    (folder / "notes.txt").write_text("mine")
    done = run("verify", str(tmp_path / NAME))
    assert done.code == 1
    low, high = part.start + 2 * BLOCK, min(part.start + 3 * BLOCK, part.end)
    assert done.out.splitlines()[1:] == [
        "  common.pt: not there",
        "  metadata.json: 120 bytes, and not 119",
        f"  {part.file}: {part.tensor}, block 3 of {len(part.sums)}, bytes {low:,} to {high:,}",
        "different",
    ]
    assert done.err == "note: not in the manifest: notes.txt\n"
    facts = json.loads(run("verify", str(folder), "--json").out)
    assert (facts["intact"], facts["damages"][0]["tensor"]) == (False, part.tensor)
    assert run("verify", str(source)).code == 2  # it has no manifest
    assert run("verify", str(folder), "--logits").code == 2


def test_a_damaged_manifest_is_reported(written: Written) -> None:
    """Whatever bit of it flips: it never says that a damaged file is whole, or a whole one damaged."""
    _, folder = written
    path = folder / MANIFEST
    whole = path.read_bytes()
    draw = random.Random(1)
    for at in [0, len(whole) - 3, *(draw.randrange(len(whole)) for _ in range(40))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(7)]) + whole[at + 1 :])
        with pytest.raises(UnreadableCheckpoint, match=rf"{MANIFEST}` (is damaged|to be checked)"):
            verify_files(folder)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableCheckpoint, match="is damaged"):
        open_checkpoint(folder)


def sealed(content: dict[str, Any]) -> bytes:
    """Return a manifest that was changed on purpose, with its checksum made anew."""
    del content["checksum"]
    text = json.dumps(content)[:-1].encode() + b", "
    return text + f'"checksum": "{xxhash.xxh3_64_hexdigest(text)}"}}\n'.encode()


def first_part(content: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = next(iter(content["tensors"].values()))["parts"][0]
    return part


Change = Callable[[dict[str, Any]], object]
HOSTILE: list[Change] = [
    lambda content: content["files"].update({"../../etc/passwd": {"size": 1, "rest": ""}}),
    lambda content: content["files"].update({"/etc/passwd": {"size": 1, "rest": ""}}),
    lambda content: first_part(content).update(bytes=[0, 2**80]),
    lambda content: first_part(content).update(bytes=[-5, 5]),
    lambda content: first_part(content).update(file="elsewhere"),
    lambda content: first_part(content).update(sums=["00"] * 1000),
    lambda content: content["checksums"].update(block=0),
    lambda content: content.update(tensors=[1, 2]),
    lambda content: content.update(files=None),
    lambda content: content.update(manifest="one"),
]


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_manifest_is_refused(
    change: Callable[[dict[str, Any]], object], source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / NAME, to="hf")
    content = content_of(tmp_path / NAME)
    change(content)
    (tmp_path / NAME / MANIFEST).write_bytes(sealed(content))
    with pytest.raises(UnreadableCheckpoint, match="is damaged"):
        verify_files(tmp_path / NAME)


def test_other_programs_files_of_the_name_say_nothing(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / NAME, to="hf")
    path = tmp_path / NAME / MANIFEST
    later = content_of(tmp_path / NAME)
    later["manifest"], later["files"] = 2, "otherwise"
    for text in (b"{}", b"[1]", sealed(later)):
        path.write_bytes(text)
        open_checkpoint(tmp_path / NAME)
        with pytest.raises(UnreadableCheckpoint, match=f"has no `{MANIFEST}`"):
            verify_files(tmp_path / NAME)


def damaged(folder: Path) -> Iterator[tuple[Callable[[], object], str]]:
    """Changes of a directory on Hugging Face's side, and what reading it says then."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    names = [b"model.layers.0.mlp.gate_proj.weight", b"model.layers.0.mlp.up_proj.weight"]
    head, data = content[: content.index(b"}}") + 2], content[content.index(b"}}") + 2 :]
    swapped = head.replace(names[0], b"@").replace(names[1], names[0]).replace(b"@", names[1]) + data
    yield lambda: file.write_bytes(swapped), "gate_proj.weight: at byte"
    retyped = head.replace(b'"dtype":"F32"', b'"dtype":"I32"') + data
    yield lambda: file.write_bytes(retyped), r"int32 \[.*\], and not float32"
    yield lambda: file.write_bytes(content), ""
    yield lambda: (folder / "config.json").write_text((folder / "config.json").read_text() + "\n"), ""
    yield lambda: (folder / "README.md").write_text("mine"), ""


def test_reading_an_output_checks_sizes_and_headers(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / NAME, to="hf")
    for change, message in damaged(tmp_path / NAME):
        change()
        if not message:
            open_checkpoint(tmp_path / NAME)
            continue
        with pytest.raises(UnreadableCheckpoint) as refused:
            open_checkpoint(tmp_path / NAME)
        assert "is not what its manifest says" in refused.value.message
        assert re.search(message, "\n".join(refused.value.items))
        assert f"remove `{MANIFEST}`" in (refused.value.hint or "")
    result = verify_files(tmp_path / NAME)
    assert result.absent  # an edited configuration is no obstacle to reading, and is no longer what was written
    (tmp_path / NAME / MANIFEST).unlink()
    open_checkpoint(tmp_path / NAME)


def test_a_foreign_file_in_the_place_of_one_is_refused(source: Path, tmp_path: Path) -> None:
    """The files of two checkpoints of one shape, mixed: each is whole, the whole is not."""
    convert(source, tmp_path / "a", tp=2)
    convert(source, tmp_path / "b", tp=1)
    a, b = tmp_path / "a" / "release", tmp_path / "b" / "release"
    shutil.copy(b / MANIFEST, a / MANIFEST)
    with pytest.raises(UnreadableCheckpoint, match="is not what its manifest says"):
        reshard(tmp_path / "a", tmp_path / "c")


def test_without_checksums_there_are_sizes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / NAME, to="hf", checksums=False)
    result = verify_files(tmp_path / NAME)
    assert (result.intact, result.has_checksums, result.nbytes) == (True, False, 0)
    done = run("verify", str(tmp_path / NAME))
    assert (done.code, done.err) == (
        0,
        "note: the manifest has no checksums (--no-checksums): only sizes were compared\n",
    )
    with (tmp_path / NAME / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert not verify_files(tmp_path / NAME).intact
    for layout in ({"tp": 1}, {"tp": 2}, {"to": "torch", "tp": 2}):
        held = []
        for checksums in (True, False):
            convert(source, tmp_path / NAME, checksums=checksums, overwrite=True, **layout)
            files = sorted(each for each in (tmp_path / NAME).rglob("*") if each.is_file() and each.name != MANIFEST)
            held.append({each: each.read_bytes() for each in files})
        assert held[0] == held[1]


def test_what_was_asked_for_is_there(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / NAME, tp=2, iteration=7, for_megatron="0.16", implementation="local")
    content = content_of(tmp_path / NAME / "iter_0000007")
    assert content["options"] == {
        "to": "torch_dist",
        "tp": 2,
        "iteration": 7,
        "for_megatron": "0.16",
        "implementation": "local",
    }
    reshard(tmp_path / NAME, tmp_path / "again", vocab_size=400)
    again = content_of(tmp_path / "again" / "release")
    assert again["options"] == {"to": "torch_dist", "vocab_size": 400}
    assert again["source"]["name"] == f"{NAME}/iter_0000007"
    assert again["source"]["manifest"] == content["checksum"]


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=30), draw=st.randoms(use_true_random=False))
def test_the_order_of_writing_changes_no_checksum(
    sizes: list[int], draw: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = draw.randbytes(sum(sizes))
    path = tmp_path_factory.mktemp("region") / "file"
    path.write_bytes(b"head" + content + b"tail")
    region = digests.Region(path, 4, 4 + len(content), None)
    pieces = []
    at = 0
    for size in sizes:
        pieces.append((at, size))
        at += size
    if draw.random() < 0.7:
        draw.shuffle(pieces)
    for at, size in pieces:
        if draw.random() < 0.9:  # what is never fed is read
            region.add(4 + at, memoryview(content)[at : at + size])
    with path.open("rb") as file:
        region.finish(file.fileno())
    assert region.sums == [
        xxhash.xxh3_64_hexdigest(content[at : at + digests.BLOCK]) for at in range(0, len(content), digests.BLOCK)
    ]


def test_a_planned_conversion_writes_none(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    convert(hf_checkpoint("gpt2"), tmp_path / NAME, dry_run=True)
    assert not list(tmp_path.iterdir())


def test_a_manifest_is_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line, and with a budget for what is kept of the lines: it may be a stranger's."""
    entries = {f"weight.{number}": {"size": 1} for number in range(4000)}
    file = tmp_path / MANIFEST
    write_manifest(file, manifest_lines({}, entries, {}, []))
    tracemalloc.start()
    try:
        manifest = read_manifest(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest is not None
    assert list(manifest.files) == list(entries)
    budget = 4000 * 450
    assert peak < budget
    monkeypatch.setattr("mcore_convert.checkpoints.manifest.MEMORY", budget // 4)
    with pytest.raises(UnreadableCheckpoint, match=f"would take more than {budget // 4:,} bytes of memory"):
        read_manifest(file)
