"""Codecs: every view of a coded tensor has the values that torch computes of the codes and the scales."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fixtures.quantised import FORMS, Tensors, mxfp4
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import safetensors
from mcore_convert.formats.hf.names import part_of_every
from mcore_convert.formats.hf.quantised import Reading, read_quantised
from mcore_convert.spec.pack import Every
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files
from mcore_convert.storage.spans import spans_of
from mcore_convert.storage.views import Slot, View


def read(path: Path, tensors: Tensors, settings: object, dtype: str = "bfloat16") -> Reading:
    """Return what a file with these tensors stands for."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    stored = safetensors.read(path / "model.safetensors")
    return read_quantised(stored, {"quantization_config": settings, "torch_dtype": dtype})


def made(form: str, path: Path, shape: tuple[int, int] = (77, 120), dtype: str = "bfloat16") -> tuple[View, Tensor]:
    """Return a coded tensor of a form and what it stands for."""
    make, settings = FORMS[form]
    stored, wanted = make(torch.zeros(shape, dtype=getattr(torch, dtype)), torch.Generator().manual_seed(3))
    read_ = read(path, {f"model.x.{end}": tensor for end, tensor in stored.items()}, settings, dtype)
    assert read_.problems == ()
    assert list(read_.views) == ["model.x.weight"]
    return read_.views["model.x.weight"], wanted


def values(view: View, dtype: str | None = None) -> Tensor:
    with Files() as files:
        bits = np.ascontiguousarray(files.read(view, dtype=dtype))
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, dtype or view.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_every_view_of_a_coded_tensor_has_its_values(form: str, dtype: str, tmp_path: Path) -> None:
    view, wanted = made(form, tmp_path, dtype=dtype)
    assert torch.equal(values(view), wanted)
    draw = random.Random(form)
    for _ in range(12):
        offsets = [draw.randrange(size) for size in wanted.shape]
        sizes = [draw.randint(1, size - low) for size, low in zip(wanted.shape, offsets, strict=True)]
        row, column = (slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        part = view.narrow(Box(tuple(offsets), tuple(sizes)))
        assert torch.equal(values(part), wanted[row, column])
        assert torch.equal(values(part.transposed), wanted[row, column].T)
        first, count = draw.randrange(wanted.numel()), draw.randint(1, 1000)
        count = min(count, wanted.numel() - first)
        run = view._replace(offset=first * view.itemsize, shape=(count,), strides=(view.itemsize,))
        assert torch.equal(values(run), wanted.reshape(-1)[first : first + count])


def test_a_value_is_rounded_once_to_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    """In fp32 it is the product in fp32, and not that of bf16 widened."""
    view, exact = made("fp8", tmp_path, dtype="float32")
    view = view._replace(dtype="bfloat16", strides=(view.shape[1] * 2, 2))
    assert torch.equal(values(view, "float32"), exact)
    assert torch.equal(values(view), exact.bfloat16())
    assert not torch.equal(values(view).float(), exact)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32)])
def test_mxfp4_has_the_values_and_the_orientation_of_gpt_oss(shape: tuple[int, int], tmp_path: Path) -> None:
    stored, wanted = mxfp4(*shape, experts=3)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (item,) = read(tmp_path, {f"a.experts.down_proj{end}": t for end, t in stored.items()}, settings).views.items()
    assert item[0] == "a.experts.down_proj"
    assert torch.equal(values(item[1]), wanted)
    assert torch.equal(values(item[1].select(1).transposed), wanted[1].T)
    assert torch.equal(values(item[1].select(2).narrow(Box((5, 7), (9, 20)))), wanted[2, 5:14, 7:27])


@pytest.mark.parametrize("form", ["fp8 small blocks", "fp8 rows", "int4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_so_many_rows_or_columns(form: str, axis: int, tmp_path: Path) -> None:
    """Rows in blocks of their own are decoded alone, and others with those between them."""
    view, whole = made(form, tmp_path)
    box = Box.whole(view.shape)
    for step, first in ((2, 0), (2, 1), (3, 1), (view.shape[axis] - 1, 0)):
        part = part_of_every(Slot(view, box), Every(axis, first, step)).view
        index = (slice(first, None, step), slice(None))
        assert torch.equal(values(part), whole[index if axis == 0 else index[::-1]])
        assert torch.equal(values(part.transposed), whole[index if axis == 0 else index[::-1]].T)


def test_pieces_of_a_coded_tensor_are_one_span_and_those_of_two_are_not(tmp_path: Path) -> None:
    make, settings = FORMS["int4"]
    both = {
        f"{name}.{end}": tensor
        for name in "ab"
        for end, tensor in make(torch.zeros(8, 64, dtype=torch.bfloat16), torch.Generator().manual_seed(1))[0].items()
    }
    views = read(tmp_path, both, settings).views
    halves = [Box((0, 0), (4, 64)), Box((4, 0), (4, 64))]
    slots = [Slot(views["a.weight"].narrow(box), box) for box in halves]
    (span,) = spans_of(slots)
    assert span.views[0].shape == (512,)
    below = Slot(views["b.weight"].narrow(halves[1]), halves[1])
    assert len(spans_of([slots[0], below])) == 2


def test_a_code_that_is_no_number_and_a_scale_that_is_none(tmp_path: Path) -> None:
    weight = torch.zeros(2, 4, dtype=torch.uint8)
    weight[0, 1], weight[1, 2], weight[1, 3] = 0x7F, 0x38, 0x7E
    stored = {"x.weight": weight.view(torch.float8_e4m3fn), "x.weight_scale": torch.tensor([[1.0], [float("inf")]])}
    got = values(read(tmp_path, stored, FORMS["fp8 rows"][1]).views["x.weight"])
    wanted = weight.view(torch.float8_e4m3fn).float() * torch.tensor([[1.0], [float("inf")]])
    assert torch.equal(got.isnan(), wanted.isnan())
    assert got[1, 2] == got[1, 3] == float("inf")


@pytest.mark.parametrize(("code", "scale", "dtype"), [(0x7E, 1e36, "bfloat16"), (0x7E, 1e3, "float16")])
def test_a_number_beyond_the_dtype_is_refused_and_one_that_is_not_stored_is_none(
    code: int, scale: float, dtype: str, tmp_path: Path
) -> None:
    """The largest code times such a scale is infinite; that is an error where an element has it."""
    for present in (True, False):
        weight = torch.full((4, 8), 0x20, dtype=torch.uint8)
        weight[2, 3] = code if present else 0x21
        scales = torch.full((4, 1), scale)
        stored = {"x.weight": weight.view(torch.float8_e4m3fn), "x.weight_scale": scales}
        view = read(tmp_path, stored, FORMS["fp8 rows"][1], dtype).views["x.weight"]
        if present:
            with pytest.raises(OverflowError, match=f"beyond the largest of {dtype}"):
                values(view)
        else:
            wanted = stored["x.weight"].float() * scales
            assert torch.equal(values(view), wanted.to(getattr(torch, dtype)))


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    view, _ = made("fp8", tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(view.stored[0].offset + 10)
    with pytest.raises(UnreadableCheckpoint, match="became shorter"):
        values(view)
