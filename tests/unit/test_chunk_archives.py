"""Archives that are alike are parsed once, and nothing that parsing refuses or tells apart is taken for one of them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import set_crc32_options

from mcore_convert.formats.files import chunk_archives
from mcore_convert.formats.files.chunk_archives import ChunkArchives
from mcore_convert.formats.files.dcp_writer import archive_of
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.storage.views import TensorMeta
from tests.fuzz.targets import parsed_alike, parsed_alone


def saved(tree: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def written(values: torch.Tensor) -> bytes:
    """Return the archive that this project writes."""
    return archive_of(TensorMeta(tuple(values.shape), "float32")).filled(values.numpy().tobytes()).literals[0][1]


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where archives began that were parsed."""
    places = []

    def counted(path: Path, offset: int, *rest: Any) -> TorchFile:
        places.append(offset)
        return TorchFile(path, offset, *rest)

    monkeypatch.setattr(chunk_archives, "TorchFile", counted)
    return places


def read_all(folder: Path, contents: list[bytes], archives: ChunkArchives) -> None:
    """Read archives that lie in one file, each compared with what it is alone."""
    file = folder / "__0_0.distcp"
    file.write_bytes(b"".join(contents))
    at = 0
    for content in contents:
        assert parsed_alike(archives, file, at, len(content)) == parsed_alone(file, at, len(content))
        at += len(content)


@pytest.mark.parametrize("kind", ["torch", "without checksums", "ours"])
def test_archives_that_differ_in_values_are_parsed_once(kind: str, tmp_path: Path, parses: list[int]) -> None:
    tensors = [torch.arange(30.0).view(5, 6) * number for number in range(1, 6)]
    if kind == "without checksums":
        set_crc32_options(False)
    try:
        contents = [written(each) if kind == "ours" else saved(each) for each in tensors]
    finally:
        set_crc32_options(True)
    read_all(tmp_path, contents, ChunkArchives())
    assert parses == [0]
    _, sums = parsed_alone(tmp_path / "__0_0.distcp", len(contents[0]), len(contents[1]))
    assert len(sums) == (kind == "torch")  # type: ignore[arg-type]


def test_what_is_not_alike_is_parsed(tmp_path: Path, parses: list[int]) -> None:
    base = torch.arange(60.0).view(6, 10)
    trees = [base, base.view(10, 6), base.T, base.view(torch.int32), base.tolist(), [base], base[1:3], b"x", base.T[2:]]
    contents = [saved(each) for each in trees]
    archives = ChunkArchives()
    read_all(tmp_path, contents, archives)
    assert len(parses) == len(trees)
    read_all(tmp_path, contents[::-1], archives)
    again = len(parses) - len(trees)
    assert again == 3, "a list of tensors, and what holds none"


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_damage_anywhere_is_met(own: bool, tmp_path: Path) -> None:
    """Every byte around the tensor, and each bit of some."""
    first, second = torch.arange(12.0), torch.arange(12.0) + 1
    content = written(second) if own else saved(second)
    archives = ChunkArchives()
    read_all(tmp_path, [written(first) if own else saved(first)], archives)
    forms = {length: list(forms) for length, forms in archives._forms.items()}
    at = content.index(second.numpy().tobytes())
    for place in (*range(at), *range(at + second.nbytes, len(content))):
        if content[place] == ord("Z") == content[place - 1] and place % 16:
            continue  # padding: some of it will do
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        archives._forms = {length: list(each) for length, each in forms.items()}
        read_all(tmp_path, [bytes(damaged)], archives)


def test_a_directory_among_the_records_is_no_form(tmp_path: Path) -> None:
    """Bytes that are not read here may be read there: a second end of the archive, in a record that nobody asks for."""
    buffer = io.BytesIO(saved(torch.arange(12.0)))
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as file:
        file.writestr("archive/note", bytes(64))
        file.comment = b"c" * 22
    content = buffer.getvalue()
    for end in (content.index(bytes(64)), len(content) - 22):
        other = bytearray(content)
        other[end : end + 22] = content[content.rindex(b"PK\x05\x06") :][:22]
        archives = ChunkArchives()
        read_all(tmp_path, [content, bytes(other), content], archives)
        read_all(tmp_path, [bytes(other), content, bytes(other)], ChunkArchives())


def test_a_form_needs_its_whole_length(tmp_path: Path) -> None:
    content = saved(torch.arange(12.0))
    archives = ChunkArchives()
    read_all(tmp_path, [content, content], archives)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes((content * 2)[:-1])
    alone = parsed_alone(file, len(content), len(content))
    assert parsed_alike(archives, file, len(content), len(content)) == alone
    assert "it ends at byte" in str(alone)


def test_many_forms_of_one_length_are_not_all_kept(tmp_path: Path, parses: list[int]) -> None:
    sizes = [size for size in range(20, 253) if 5040 % size == 0]  # in pickles, numbers of one byte each
    contents = [saved(torch.ones(5040).view(-1, size)) for size in sizes]
    assert len({len(content) for content in contents}) == 1
    archives = ChunkArchives()
    read_all(tmp_path, contents, archives)
    read_all(tmp_path, contents, archives)
    assert len(parses) == 2 * len(sizes) - chunk_archives.MAX_FORMS
