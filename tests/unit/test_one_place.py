"""No byte of a source is two tensors, and what a writer has stored of its bytes is compared with them."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from mcore_convert import convert, export, verify
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.dcp_metadata import metadata_bytes
from mcore_convert.formats.files.torch_archive import TorchFile
from tests.conftest import HfMaker, real_checkpoint
from tests.refusals import refusal


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory, hf_checkpoint: HfMaker) -> Path:
    path = tmp_path_factory.mktemp("dist") / "dist"
    convert(hf_checkpoint("llama-gqa", tokenizer=False), path, tp=2)
    return path


def rewritten(source: Path, path: Path, change: int | str) -> Path:
    """Return a copy of a `torch_dist` directory whose `.metadata` gives one chunk another place:
    the other chunk's number.
    """
    shutil.copytree(source, path)
    folder = path / "release"
    directory = dcp.read(folder)
    chunks = {key: list(parts) for key, parts in directory.chunks.items()}
    parts = chunks["decoder.layers.mlp.linear_fc2.weight"]
    if change == "other key":
        other = chunks["decoder.layers.self_attention.linear_proj.weight"][0].place
    else:
        other = parts[int(change)].place
    parts[0] = parts[0]._replace(place=other)
    (folder / dcp.METADATA).write_bytes(metadata_bytes(directory.tensors, chunks, directory.objects))
    return path


@pytest.mark.parametrize("change", [1, 3, "other key"])
def test_two_chunks_at_one_place_are_refused(change: int | str, distributed: Path, tmp_path: Path) -> None:
    shown = refusal(rewritten(distributed, tmp_path / "SRC", change), "--to", "hf")
    lines = shown.splitlines()
    assert lines[0] == "error: `SRC/release/.metadata` has several parts at one place"
    assert lines[1].startswith("         decoder.layers.")
    assert len([line for line in lines if ": byte " in line]) == 2


def test_overlapping_chunks_are_refused(distributed: Path, tmp_path: Path) -> None:
    shutil.copytree(distributed, tmp_path / "SRC")
    directory = dcp.read(tmp_path / "SRC/release")
    key = "decoder.layers.mlp.linear_fc2.weight"
    place = directory.chunks[key][1].place
    directory.chunks[key][1] = directory.chunks[key][1]._replace(place=place._replace(offset=place.offset - 100))
    content = metadata_bytes(directory.tensors, directory.chunks, directory.objects)
    (tmp_path / "SRC/release/.metadata").write_bytes(content)
    assert "has several parts at one place" in refusal(tmp_path / "SRC", "--to", "hf")


def test_a_file_that_nothing_refers_to_is_reported(distributed: Path, tmp_path: Path) -> None:
    shutil.copytree(distributed, tmp_path / "SRC")
    assert not [note for note in convert(tmp_path / "SRC", tmp_path / "a", to="hf").notes if "refers" in note]
    shutil.copyfile(distributed / "release/__0_0.distcp", tmp_path / "SRC/release/__7_0.distcp")
    notes = convert(tmp_path / "SRC", tmp_path / "b", to="hf").notes
    assert [note for note in notes if "`.metadata` refers to nothing in `__7_0.distcp`" in note]
    assert [note for note in verify(tmp_path / "SRC", distributed).notes if "__7_0.distcp" in note]


@pytest.mark.parametrize("name", ["llama_tp2pp2", "llama_tp2dp2", "gpt2_tp2pp2", "m19_llama_tp2pp2"])
def test_real_checkpoints_have_each_part_at_its_own_place(name: str) -> None:
    path = real_checkpoint(name)
    for metadata in path.rglob(".metadata"):
        assert dcp.read(metadata.parent).unreferenced == []


@pytest.fixture
def pickled(hf_checkpoint: HfMaker, tmp_path: Path) -> Path:
    """A model whose weights lie in a `.bin` file of torch's own, with checksums."""
    made = hf_checkpoint("gpt2", tokenizer=False)
    path = Path(shutil.copytree(made, tmp_path / "SRC"))
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    return path


def record_at(file: Path, name: str) -> tuple[int, int]:
    """Return where the bytes of a record begin, and how many they are."""
    with zipfile.ZipFile(file) as archive:
        info = next(each for each in archive.infolist() if each.filename.endswith(name))
    raw = file.read_bytes()
    name_size, extra_size = struct.unpack_from("<HH", raw, info.header_offset + 26)
    return info.header_offset + 30 + name_size + extra_size, info.file_size


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_a_flipped_bit_in_the_pickle_of_an_archive(pickled: Path) -> None:
    file = pickled / "pytorch_model.bin"
    start, size = record_at(file, "data.pkl")
    raw = file.read_bytes()
    names = raw[start : start + size].find(b"h.0.attn.c_attn.bias")
    flip(file, start + names + 2)  # another name, in a pickle that still loads
    assert "does not have the checksum that is stored with it" in refusal(pickled)


def test_a_flipped_bit_in_a_tensor_of_an_archive(pickled: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(pickled, tmp_path / "whole"))
    assert verify(pickled, whole).equal
    file = pickled / "pytorch_model.bin"
    start, _ = record_at(file, "data/3")
    flip(file, start)
    message = r"checksums that are stored with them\n.*data/3 of .*pytorch_model\.bin"
    with pytest.raises(UnreadableCheckpoint) as caught:
        verify(pickled, whole)
    assert "data/3" in str(caught.value), message
    with pytest.raises(UnreadableCheckpoint, match="do not have the checksums that are stored with them"):
        export(pickled, tmp_path / "DST", with_tokenizer=False)
    assert not (tmp_path / "DST").exists()


def test_without_checksums_nothing_is_compared(pickled: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        tensors = torch.load(pickled / "pytorch_model.bin")
        torch.save(tensors, pickled / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    assert not list(TorchFile(pickled / "pytorch_model.bin").sums)
    assert verify(pickled, pickled).equal


def test_two_records_at_one_place_are_refused(pickled: Path) -> None:
    file = pickled / "pytorch_model.bin"
    raw = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        offsets = {info.filename.rpartition("/")[2]: info.header_offset for info in archive.infolist()}
        names = {info.filename.rpartition("/")[2]: info.filename for info in archive.infolist()}
    at = raw.rfind(names["3"].encode() + b"PK\x01\x02")
    if at < 0:
        at = raw.rfind(names["3"].encode())
    assert raw[at - 46 : at - 42] == b"PK\x01\x02"
    raw[at - 4 : at] = struct.pack("<L", offsets["4"])
    file.write_bytes(raw)
    assert "lie in one another" in refusal(pickled)


def test_tied_tensors_are_one_and_overlapping_ones_are_refused(pickled: Path, tmp_path: Path) -> None:
    file = pickled / "pytorch_model.bin"
    tensors = torch.load(file)
    name = next(name for name in tensors if name.endswith("wte.weight"))
    torch.save({**tensors, "lm_head.weight": tensors[name]}, file)
    convert(pickled, tmp_path / "tied")
    both = torch.zeros(tensors[name].numel() + 1)
    shape = tensors[name].shape
    torch.save({**tensors, name: both[1:].view(shape), "lm_head.weight": both[:-1].view(shape)}, file)
    assert "has different tensors at one place" in refusal(pickled, to=tmp_path / "DST")
