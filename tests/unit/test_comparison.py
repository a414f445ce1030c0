"""The engine of `verify` and `diff`: against numpy in fp64 for every pair of dtypes, and the memory that it takes."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import LLAMA, make_llama
from mcore_convert import diff, verify
from mcore_convert.comparison import change
from mcore_convert.comparison.change import Gap, gaps_between
from mcore_convert.spec.shard import Box
from mcore_convert.storage.elements import Files
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.views import Slot, TensorMeta, View

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "int64")
SHAPE = (3, 705)


def written(path: Path, tensor: torch.Tensor, *, transposed: bool = False) -> list[Slot]:
    """Return the slots of a tensor in a file of its own, of its transpose where asked for."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    stored = (tensor.T if transposed else tensor).contiguous()
    path.write_bytes(stored.view(torch.uint8).numpy().tobytes())
    view = View.of(path, 0, TensorMeta(tuple(stored.shape), dtype))
    return [Slot(view.transposed if transposed else view, Box.whole(tuple(tensor.shape)))]


def gap(a: list[Slot], b: list[Slot], *, norms: bool) -> Gap:
    with Files() as files:
        (only,) = gaps_between([(a, b)], files, Meter(0, None), norms=norms)
        return only


def values(tensor: torch.Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = tensor.double().numpy()
    return array


@pytest.mark.parametrize(("first", "second"), list(itertools.product(DTYPES, repeat=2)))
def test_a_gap_is_what_numpy_computes(first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "EXACT_STEP", 1000)  # several steps
    torch.manual_seed(0)
    base = torch.randn(SHAPE) * 8
    other = torch.where(torch.rand(SHAPE) < 0.3, base + torch.randn(SHAPE), base)
    a, b = base.to(getattr(torch, first)), other.to(getattr(torch, second))
    x, y = values(a), values(b)
    for norms in (True, False):
        result = gap(written(tmp_path / "a", a), written(tmp_path / "b", b, transposed=True), norms=norms)
        assert result.num_changed == np.count_nonzero(x != y) > 0
        assert result.largest == pytest.approx(np.abs(y - x).max(), rel=1e-6)
        assert result.largest_at is not None
        assert abs(y - x)[result.largest_at] == np.abs(y - x).max()
        assert math.sqrt(result.squares) == pytest.approx(np.linalg.norm(y - x), rel=1e-5)
        assert math.sqrt(result.squares_a) == pytest.approx(np.linalg.norm(x), rel=1e-5)
        assert (result.num_bad_a, result.num_bad_b, result.largest_apart) == (0, 0, 0.0)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")])
def test_what_is_not_finite_is_counted_and_measured_apart(dtypes: tuple[str, str], tmp_path: Path) -> None:
    one, two = (torch.ones(4, 7, dtype=getattr(torch, dtype)) for dtype in dtypes)
    one[0, 0] = two[0, 0] = math.nan  # the same on both sides
    one[1, 1] = two[1, 1] = math.inf
    two[2, 2] = 3.0
    result = gap(written(tmp_path / "a", one), written(tmp_path / "b", two), norms=False)
    assert (result.num_changed, result.num_bad_a, result.num_bad_b, result.largest_apart) == (1, 2, 2, 0.0)
    assert (result.largest, result.largest_at, result.values) == (2.0, (2, 2), (1.0, 3.0))
    two[1, 1] = -math.inf
    result = gap(written(tmp_path / "a", one), written(tmp_path / "b", two), norms=False)
    assert (result.num_changed, result.largest_apart, result.largest) == (2, math.inf, 2.0)
    two[3, 3] = math.nan
    result = gap(written(tmp_path / "a", one), written(tmp_path / "b", two), norms=False)
    assert result.num_changed == 3
    assert math.isnan(result.largest_apart)


def test_a_tensor_that_one_side_lacks_is_compared_with_zeros(tmp_path: Path) -> None:
    tensor = torch.zeros(5, 3, dtype=torch.bfloat16)
    tensor[1, 1] = -0.0
    slots = written(tmp_path / "a", tensor)
    assert gap(slots, [], norms=False).num_changed == 0
    tensor[4, 2] = -2.0
    for result in (gap(written(tmp_path / "a", tensor), [], norms=False), gap([], slots, norms=False)):
        assert (result.num_changed, result.largest) == (1, 2.0)
    assert gap([], [], norms=False) == Gap()


def test_verify_and_diff_agree_and_hold_no_tensor(tmp_path: Path) -> None:
    """An embedding of 8 million elements in two dtypes: widened at once it would take 64 MiB a side."""
    sizes = {"hidden_size": 64, "head_dim": 8, "num_attention_heads": 8, "intermediate_size": 64}
    one = make_llama(tmp_path / "one", LLAMA | sizes | {"num_hidden_layers": 1}, sparse=True, shards=1)
    two = tmp_path / "two"
    two.mkdir()
    (two / "config.json").write_bytes((one / "config.json").read_bytes())
    (file,) = one.glob("*.safetensors")
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    tensors["model.embed_tokens.weight"][128255, 63] = 0.75
    save_file(tensors, two / "model.safetensors", {"format": "pt"})
    del tensors
    tracemalloc.start()
    verification, comparison = verify(one, two), diff(one, two)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 * 2**20
    (embedding, *_) = verification.differences
    (most,) = comparison.most_changed(1)
    assert (embedding.name, embedding.num_elements, embedding.largest) == (most.name, most.num_changed, 0.75)
    assert most.largest_at == (128255, 63)
