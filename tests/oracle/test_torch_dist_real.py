"""Optimizer state of `torch_dist` that Megatron-LM wrote, and tensors that it flattened."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_convert.formats.files import dcp
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.formats.torch_dist.keys import StateKeys
from mcore_convert.spec.names import EXP_AVG_SQ, MASTER, PARAM
from mcore_convert.spec.shard import Box
from mcore_convert.spec.tiling import untiled
from mcore_convert.storage.elements import Files, global_tensor
from mcore_convert.storage.views import TensorMeta
from tests.conftest import real_checkpoint
from tests.oracle.test_torch_dist_optimizer import reshard, states_in
from tests.tensors import dcp_tensors

RESHARDABLE = ["gpt2_tp2pp2", "llama_tp2pp2", "m19_llama_tp2pp2"]


REAL = [
    *RESHARDABLE,
    "llama_tp2dp2",
    "transformer_engine_names/v0.12.0_llama_te_torch_dist",
    "transformer_engine_names/v0.16.1_llama_te_torch_dist",
    "transformer_engine_names/v0.16.1_moe_te_torch_dist",
]


@pytest.mark.parametrize("name", REAL)
def test_real_masters_round_to_the_weights(name: str) -> None:
    actual = states_in(real_checkpoint(name))
    masters = {key for key, state in actual if state == MASTER}
    assert masters == {key for key, _ in actual}
    for key in masters:
        weight = actual[key, PARAM]
        assert torch.equal(actual[key, MASTER].to(weight.dtype), weight), key
        if name.startswith("llama"):  # trained in the directories of these names: masters are finer than weights
            assert not torch.equal(actual[key, MASTER], weight.float()), key


@pytest.mark.parametrize("name", RESHARDABLE)
def test_real_states_are_those_that_torch_reads(name: str) -> None:
    path = real_checkpoint(name)
    stored = dcp_tensors(next(path.glob("iter_*")))
    for (key, state), tensor in states_in(path).items():
        if state != PARAM:
            head, _, tail = key.partition(".layers.")
            layer, _, rest = tail.partition(".")
            kind = "param" if state == MASTER else state
            whole = stored[f"optimizer.state.{kind}.{f'{head}.layers.{rest}' if tail else key}"]
            assert torch.equal(tensor, whole[int(layer)] if tail else whole), (key, state)
            assert tensor.any()


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints_become_reshardable(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    experts = "moe" in name
    reshard(source, tmp_path / "again", ep=2 if experts else 1)
    actual, wanted = states_in(tmp_path / "again"), states_in(source)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    stored = dcp_tensors(tmp_path / "again/iter_0000010")
    assert torch.equal(
        stored["optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"],
        wanted["decoder.final_layernorm.weight", EXP_AVG_SQ],
    )
    assert open_torch_dist(tmp_path / "again").training == open_torch_dist(source).training


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), max_size=3),
)
def test_flattened_tensors_get_their_shape_back(axes: list[tuple[int, int]], cuts: list[int]) -> None:
    """Each cell of the grid was flattened, and data-parallel ranks hold any parts of it (Megatron Core 0.8 to 0.14)."""
    grid, local = tuple(cells for cells, _ in axes), tuple(size for _, size in axes)
    whole = tuple(cells * size for cells, size in axes)
    tensor = torch.arange(math.prod(whole), dtype=torch.float32).reshape(whole)
    numel = math.prod(local)
    bounds = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    with tempfile.TemporaryDirectory() as scratch:
        chunks: list[dcp.Chunk] = []
        for cell in itertools.product(*map(range, grid)):
            box = tuple(slice(at * size, (at + 1) * size) for at, size in zip(cell, local, strict=True))
            flat = tensor[box].reshape(-1)
            for low, high in itertools.pairwise(bounds):
                file = Path(scratch, f"{len(chunks)}")
                torch.save(flat[low:high].reshape((*(1 for _ in grid), high - low)).clone(), file)
                place = dcp.Place(file.name, 0, file.stat().st_size)
                chunks.append(dcp.Chunk(Box((*cell, low), (*(1 for _ in grid), high - low)), place))
        meta = TensorMeta((*grid, numel), "float32")
        directory = dcp.Directory(Path(scratch), {"key": meta}, {"key": chunks}, {}, {"key": whole})
        keys = StateKeys(directory, {"key": "key"})
        slots = keys.slots("key")
        assert keys.tensors["key"].shape == whole
        assert untiled([slot.box for slot in slots], whole) is None
        with Files() as files:
            result = torch.from_numpy(global_tensor(files, slots, whole).copy()).view(torch.float32)
        assert torch.equal(result, tensor)
