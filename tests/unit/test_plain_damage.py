"""Damage as it comes: each a refusal in words with the file's name, with nothing left behind."""

from __future__ import annotations

import json
import os
import pickletools
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mcore_convert import convert, verify
from mcore_convert.cli import failures
from mcore_convert.errors import UnreadableCheckpoint
from tests.fuzz.mutations import CORPUS
from tests.refusals import Ended, refusal, run, tree


def laid(name: str, home: Path) -> Path:
    """Return a checkpoint of the corpus, at `home/SRC`."""
    with zipfile.ZipFile(CORPUS / "checkpoints" / f"{name}.zip") as archive:
        archive.extractall(home / "SRC")
    return home / "SRC"


def reshard_refusal(source: Path) -> str:
    before = tree(source.parent)
    ended = run("reshard", source, source.parent / "DST", "--tp", "1")
    assert (ended.code, ended.out) == (1, ""), ended
    assert tree(source.parent) == before
    return ended.err


def edited_config(source: Path, **fields: Any) -> Path:
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return source


def test_a_chunk_of_zarr_that_is_cut_off(tmp_path: Path) -> None:
    source = laid("zarr", tmp_path)
    for key in (
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight",
        "embedding.word_embeddings.weight",
    ):
        file = max((each for each in source.rglob(f"{key}/*") if each.name != ".zarray"), key=lambda each: each.name)
        whole = file.read_bytes()
        for content in (whole[:-1], b""):
            file.write_bytes(content)
            text = reshard_refusal(source)
            assert f"{key}/{file.name} has {len(content)} of {len(whole)} bytes" in text
        file.unlink()
        assert f"{key}/{file.name} is missing" in reshard_refusal(source)
        file.write_bytes(whole)
    (source / "unrelated").mkdir()
    assert run("reshard", source, tmp_path / "DST", "--tp", "1").code == 0


@pytest.mark.parametrize("where", ["config value", "config key", "index", "header", "raw"])
def test_half_of_a_surrogate_pair(where: str, tmp_path: Path) -> None:
    source = laid("hf_shards" if where == "index" else "hf", tmp_path)
    half = '"\\ud800"'
    if where.startswith("config"):
        extra = f'"_name_or_path": {half}' if where == "config value" else f"{half}: 1"
        file = source / "config.json"
        file.write_text("{" + extra + "," + file.read_text().lstrip("{ \n"))
    elif where == "index":
        file = source / "model.safetensors.index.json"
        file.write_text(
            file.read_text().replace('"weight_map": {', f'"weight_map": {{{half}: "model-00001-of-00002.safetensors",')
        )
    else:
        file = source / "model.safetensors"
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        name = half.encode() if where == "header" else b'"\xed\xa0\x80"'
        header = (
            b"{"
            + name
            + b":"
            + b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
            + file.read_bytes()[9 : 8 + length]
        )
        file.write_bytes(struct.pack("<Q", len(header)) + header + file.read_bytes()[8 + length :])
    text = refusal(source)
    assert file.name in text
    assert "surrogate" in text or "invalid continuation byte" in text


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_number_of_5000_digits(file: str, tmp_path: Path) -> None:
    number = b"9" * 5000
    source = laid("hf_shards" if "index" in file else "hf", tmp_path)
    path = source / file
    content = path.read_bytes()
    if file == "config.json":
        path.write_bytes(content.replace(b'"hidden_size": 8', b'"hidden_size": ' + number))
    elif file == "model.safetensors":
        header = b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,%b]}}' % (number, number)
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    else:
        path.write_bytes(content.replace(b'"total_size": ', b'"total_size": ' + number))
    assert file in refusal(source)


def test_names_with_a_number_of_5000_digits(tmp_path: Path) -> None:
    """Which are listed, with those of layers folded."""
    source = laid("hf_shards", tmp_path)
    path = source / "model.safetensors.index.json"
    first = re.search(rb'"[\w.-]+\.safetensors"', path.read_bytes())
    assert first is not None
    names = b", ".join(b'"a.%b.w": %b' % (number, first[0]) for number in (b"9" * 5000, b"0", b"1"))
    path.write_bytes(path.read_bytes().replace(b'"weight_map": {', b'"weight_map": {' + names + b", "))
    text = refusal(source)
    assert f"a.{'9' * 5000}.w" in text
    assert "a.{0...1}.w" in text


def archive_with(path: Path, pickled: bytes) -> None:
    """Write a file of torch with this pickle, and no tensor."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/byteorder", b"little")


@pytest.mark.parametrize("key", [b"K\x01", b"N", b"G?\xf0\0\0\0\0\0\0", b"K\x01K\x02\x86", b"\x88", b"C\x01a"])
def test_keys_that_are_no_names(key: bytes, tmp_path: Path) -> None:
    """In a state dict, and in a rank's file."""
    assert list(pickletools.genops(b"\x80\x04}" + key + b"K\x00s."))
    for name, file in (
        ("hf_bin", "pytorch_model.bin"),
        ("ranks", "mp_rank_00/model_optim_rng.pt"),
    ):
        source = laid(name, tmp_path / name)
        (path,) = source.rglob(file)
        archive_with(path, b"\x80\x04}" + key + b"K\x00s.")
        assert refusal(source, *(("--to", "hf") if name != "hf_bin" else ())).startswith("error: ")


NAMES = ("{layer}", "{0}", "{}", "{", "}", "{x!r:>{y}}", "model.layers.{layer}.x", "%s", "\\", "a\nb", "\x1b[2J")


@pytest.mark.parametrize("name", NAMES)
def test_a_strange_name_of_a_tensor(name: str, tmp_path: Path) -> None:
    source = laid("hf", tmp_path)
    file = source / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: np.zeros(2, np.float32)}, file)
    text = refusal(source)
    assert "names that its configuration does not" in text or "no place" in text or "unknown" in text, text
    assert text.isprintable() or set("".join(text.split("\n"))) <= {c for c in text if c.isprintable()}
    save_file({**dict(list(tensors.items())[1:]), name: next(iter(tensors.values()))}, file)
    assert refusal(source).startswith("error: ")


def with_tree(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a rank's file holds, with torch itself."""
    import torch

    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a group too many": lambda o: o["optimizer"]["param_groups"].append(o["optimizer"]["param_groups"][0]),
    "a group too few": lambda o: o["optimizer"]["param_groups"].pop(),
    "no groups": lambda o: o["optimizer"].update(param_groups=[]),
    "groups are no list": lambda o: o["optimizer"].update(param_groups={"a": 1}),
    "a group is no dict": lambda o: o["optimizer"]["param_groups"].__setitem__(0, 7),
    "a group without parameters": lambda o: o["optimizer"]["param_groups"][0].pop("params"),
    "parameters are a number": lambda o: o["optimizer"]["param_groups"][0].update(params=3),
    "parameters are lists": lambda o: o["optimizer"]["param_groups"][0].update(params=[[0]] * 9),
    "state is a list": lambda o: o["optimizer"].update(state=[1, 2]),
    "a state is a number": lambda o: o["optimizer"]["state"].update({0: 5}),
    "a moment is text": lambda o: o["optimizer"]["state"][0].update(exp_avg="x"),
    "a master too few": lambda o: o["fp32_from_fp16_params"][0].pop(),
    "masters of a group too few": lambda o: o["fp32_from_fp16_params"].pop(),
    "masters are a dict": lambda o: o.update(fp32_from_fp16_params={0: 1}),
    "masters are numbers": lambda o: o.update(fp32_from_fp16_params=[1, 2]),
    "the optimizer is a list": lambda o: o.update(optimizer=[1]),
}


@pytest.mark.oracle  # torch starts a process
@pytest.mark.parametrize("change", CHANGES)
def test_optimizers_of_ranks_that_do_not_fit(change: str, tmp_path: Path) -> None:
    source = laid("ranks_plain", tmp_path)
    for file in sorted(source.rglob("model_optim_rng.pt")):
        with_tree(file, lambda content: CHANGES[change](content["optimizer"]))
    text = reshard_refusal(source)
    assert text.startswith("error: "), text


BYTES = b"m\xff\xfe\xe9"


def test_paths_that_are_not_utf8(tmp_path: Path) -> None:
    """They work as any other; where text is made of them, the bytes are shown as escapes."""
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + BYTES))
    source = laid("hf", home)
    destination = home / os.fsdecode(b"d\xff")
    assert run("convert", source, destination).code == 0
    assert verify(source, destination).equal
    assert run("inspect", source, "--json").code == 0
    assert "m\\udcff" in run("inspect", source).out
    for command in (("inspect", source, "--html", home / os.fsdecode(b"p\xff.html")), ("diff", source, destination)):
        ended: Ended = run(*command)
        assert ended.code == 0, ended
    assert run("export", destination, home / os.fsdecode(b"e\xff"), "--no-tokenizer").code == 0
    missing = run("convert", home / os.fsdecode(b"no\xff"), home / "x")
    assert (missing.code, missing.err.startswith("error: ")) == (1, True)
    assert not [entry for entry in home.iterdir() if "partial" in entry.name or "lock" in entry.name]


@pytest.mark.slow  # the name of the platform takes a process
def test_what_nobody_expected_is_a_line_and_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = laid("hf", tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("broken \udcff\nin two lines")

    monkeypatch.setattr("mcore_convert.api.execute", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(AssertionError, match="unexpected ZeroDivisionError"):
        run("convert", source, tmp_path / "DST")
    (report,) = tmp_path.glob("mcore-convert-*.txt")
    assert "ZeroDivisionError: broken" in report.read_text()
    assert failures.BUG == 3


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=["stdout", "stderr", "all"])
def test_closed_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Descriptors 0 to 2 must not become those of the files that are written."""
    source = laid("hf", tmp_path)
    program = (
        f"import os; [os.close(fd) for fd in {closed}]; "
        f"os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'mcore_convert', 'convert', 'SRC', 'DST'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert verify(source, tmp_path / "DST").equal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DST", "SRC"]


@pytest.mark.slow
def test_a_reader_that_is_gone(tmp_path: Path) -> None:
    laid("hf", tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "mcore_convert", "inspect", "SRC"]
    ended = subprocess.run(words, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")
    shutil.rmtree(tmp_path / "SRC")


@pytest.mark.parametrize("at", [26, 28], ids=["of its name", "of its padding"])
def test_a_record_whose_header_gives_another_size(at: int, tmp_path: Path) -> None:
    """The bytes of a tensor begin behind it: a bit of a size, and they were read from elsewhere, without a word."""
    source = laid("hf_bin", tmp_path)
    file = source / "pytorch_model.bin"
    whole = file.read_bytes()
    header = whole.index(b"PK\x03\x04", whole.index(b"data/3") - 40)
    for bit in range(16):
        changed = bytearray(whole)
        changed[header + at + bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        text = refusal(source)
        assert "does not fit its record" in text or "does not fit" in text or "it ends at" in text, text


@pytest.mark.parametrize("name", ["dist", "ranks", "hf"])
def test_a_description_that_changes_while_it_is_converted(name: str, tmp_path: Path) -> None:
    """What was planned with is what stands there in the end: the metadata too, and not the tensors alone."""
    files = {
        "dist": (".metadata", "common.pt", "metadata.json"),
        "ranks": ("model_optim_rng.pt",),
        "hf": ("config.json",),
    }
    for number, file in enumerate(files[name]):
        source = laid(name, tmp_path / str(number))
        (path,) = list(source.rglob(file))[:1]

        def change(done: int, total: int, path: Path = path) -> None:
            os.utime(path, ns=(0, 1))

        with pytest.raises(UnreadableCheckpoint, match="the source has changed since it was opened") as caught:
            convert(source, source.parent / "DST", progress=change)
        assert caught.value.items == (str(path),)
        assert [each.name for each in source.parent.iterdir()] == ["SRC"]


def test_a_tracker_may_change(tmp_path: Path) -> None:
    source = laid("dist", tmp_path)
    tracker = source / "latest_checkpointed_iteration.txt"

    def change(done: int, total: int) -> None:
        tracker.write_text("20")

    convert(source, tmp_path / "DST", progress=change)
    assert tracker.read_text() == "20"


@pytest.mark.oracle  # torch starts a process
@pytest.mark.parametrize("how", ["one inside", "shifted", "tied", "moment"])
def test_tensors_of_a_rank_at_one_place(how: str, tmp_path: Path) -> None:
    """Two weights that share bytes are damage, unless they are one and the same tensor, as tied embeddings are."""
    import torch

    source = laid("ranks_plain", tmp_path)

    def change(content: dict[str, Any]) -> None:
        model, moments = content["model"], content["optimizer"]["optimizer"]["state"]
        names = [key for key, value in model.items() if isinstance(value, torch.Tensor) and value.ndim == 1]
        joint = torch.arange(12, dtype=model[names[0]].dtype)
        if how == "one inside":
            model[names[0]], model[names[1]] = joint[:8], joint[4:12]
        elif how == "shifted":
            model[names[0]], model[names[1]] = joint[:8], joint[1:9]
        elif how == "tied":
            model[names[0]] = model[names[1]] = joint[:8]
        else:
            moments[0]["exp_avg"] = moments[1]["exp_avg"].flatten()[:8]

    for file in source.rglob("model_optim_rng.pt"):
        with_tree(file, change)
    if how == "tied":
        ended = run("reshard", source, tmp_path / "DST", "--tp", "1", "--no-optimizer")
        assert "at one place" not in ended.err
        return
    text = reshard_refusal(source)
    assert "has different tensors at one place" in text
    assert " and " in text
