"""Every element of a plan is read once, in long runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_convert.checkpoints.contents import contents_of
from mcore_convert.checkpoints.identify import open_any
from mcore_convert.spec.shard import Box
from mcore_convert.storage import spans
from mcore_convert.storage.blocks import Scratch, read
from mcore_convert.storage.elements import Files
from mcore_convert.storage.spans import paired_spans, parts_of, spans_of
from mcore_convert.storage.views import Slot, TensorMeta, View
from tests.conftest import HfMaker

# runs


Plan = tuple[tuple[int, ...], list[Box], tuple[int, ...], bool]


@st.composite
def plans_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Plan:
    """Return a grid of boxes that tile a shape, the order in which they are stored, and whether each is transposed."""
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        spans = list(itertools.pairwise(cuts))
        boxes = [Box((*b.offsets, low), (*b.sizes, high - low)) for b in boxes for low, high in spans]
    return shape, boxes, tuple(draw(st.permutations(range(len(boxes))))), draw(st.booleans())


def stored(content: np.ndarray[Any, Any], plan: Plan, path: Path) -> list[Slot]:
    """Write a tensor as its boxes, one after the other, and say where each is."""
    _, boxes, order, transposed = plan
    slots, data = [], b""
    for number in order:
        box = boxes[number]
        part = content[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        kept = part.T if transposed else part
        view = View.of(path, len(data), TensorMeta(kept.shape, "int32"))
        slots.append(Slot(view.transposed if transposed else view, box))
        data += np.ascontiguousarray(kept).tobytes()
    path.write_bytes(data)
    return slots


@given(data=st.data(), step=st.sampled_from([1, 8, 40, 1 << 20]))
@settings(deadline=None, max_examples=60)
def test_every_element_is_in_one_place_of_one_run(
    data: st.DataObject, step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However a tensor is cut, stored and turned on either side: each element is met once, beside its partner."""
    folder = tmp_path_factory.mktemp("runs")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    first, second = data.draw(plans_of(shape)), data.draw(plans_of(shape))
    content = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    mine, theirs = stored(content, first, folder / "a"), stored(content + 1000, second, folder / "b")
    with pytest.MonkeyPatch.context() as patch, Files() as files:
        patch.setattr(spans, "STEP", step)
        patch.setattr(spans, "PART", 3 * step)
        for made in (spans_of(mine), paired_spans(mine, theirs)):
            seen = []
            for part in parts_of(made):
                for block in part.blocks:
                    values = [read(files, v, block, Scratch(), "x").exact.astype(int) for v in part.span.views]
                    for number, value in enumerate(values[0]):
                        place = part.span.place(block.start + number)
                        assert content[place] == value
                        assert all(other[number] == value + 1000 for other in values[1:])
                        seen.append(place)
            assert sorted(seen) == sorted(np.ndindex(shape))


def test_what_lies_together_is_one_run(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """The queries of all groups stand one after the other in Hugging Face's tensor: they are read at once."""

    source = contents_of(open_any(hf_checkpoint("llama-gqa")))
    (qkv,) = [t for t in source.tensors if t.name == "decoder.layers.0.self_attention.linear_qkv.weight"]
    assert len(qkv.slots) == 3 * 4
    assert len(spans_of(qkv.slots)) <= 3
