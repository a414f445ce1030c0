"""Master weights as 16-bit remainders: what Megatron Core's distributed optimizer saves of them is read and resharded.

Megatron's own code lays the state out. What Transformer Engine's `FusedAdam` holds, which needs a GPU, is computed.
"""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.mp_rank import load_mp_rank, save_mp_rank
from fixtures.optimizer import State, load_with_optimizer, random_state, save_with_optimizer
from mcore_convert import ConvertError, reshard, verify
from mcore_convert.checkpoints.checks import prove
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.formats.base import Checkpoint
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.names import MASTER, PARAM
from mcore_convert.storage.elements import Files, global_tensor
from mcore_convert.storage.views import Slot
from tests.oracle.test_megatron_fixtures import ARGS, EXPERTS
from tests.ranks import run_ranks

FORMS = ("dp_reshardable", "fully_reshardable", "torch")
FULL: dict[str, Any] = {**ARGS, "vocab_size": 32, "make_vocab_size_divisible_by": 16}


def ties(state: State) -> State:
    """Return the state, every fifth master copy halfway between two weights,
    where the kernel does not round to even.
    """

    def halved(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.int32).clone().view(-1)
        bits[::5] = (bits[::5] & ~0xFFFF) | 0x8000
        return bits.view(torch.float32).view(tensor.shape)

    return State({name: halved(tensor) for name, tensor in state.master.items()}, state.exp_avg, state.exp_avg_sq)


STATE = ties(random_state(ARGS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One state at TP2 PP2 in each form that keeps remainders; `dp_reshardable` from four ranks, at TP2 DP2, too."""
    made = {form: tmp_path_factory.mktemp("remainders") / form for form in (*FORMS, "replicated")}
    save = partial(save_with_optimizer, FULL, STATE, remainders=True)
    run_ranks(4, lambda: save(made["dp_reshardable"], "dp_reshardable", tp=2, pp=2))
    run_ranks(4, lambda: save(made["replicated"], "dp_reshardable", tp=2))
    run_ranks(4, lambda: save(made["fully_reshardable"], "fully_reshardable", tp=2, pp=2))
    ranks = partial(save_mp_rank, FULL, STATE, made["torch"], optimizer="distributed", dtype=torch.bfloat16)
    run_ranks(4, lambda: ranks(remainders=True, tp=2, pp=2))
    return made


def opened(path: Path) -> Checkpoint:
    return open_mp_rank(path) if list(path.rglob("mp_rank_*")) else open_torch_dist(path)


def slots_in(path: Path) -> dict[tuple[str, str], list[Slot]]:
    """Return the slots of every state of every weight, what must hold in the data proven."""
    checkpoint = opened(path)
    assert checkpoint.common.args is not None
    args = arguments.normalise(checkpoint.common.args)
    dims = Dims.of(args, vocab_size=32, padded_vocab_size=32)
    sources = find_weights(gpt.family(args), dims, checkpoint, checkpoint.states)
    prove(sources.checks)
    return {(str(item._replace(state=PARAM)), item.state): slots for item, slots in sources.slots.items()}


def states_in(path: Path) -> dict[tuple[str, str], Tensor]:
    """Return every state of every weight."""
    result = {}
    with Files() as files:
        for key, slots in slots_in(path).items():
            shape = STATE.master[key[0]].shape
            result[key] = torch.from_numpy(global_tensor(files, slots, tuple(shape)).copy())
            result[key] = result[key].view(getattr(torch, slots[0].view.dtype))
    return result


def assert_is_state(actual: dict[tuple[str, str], Tensor]) -> None:
    """Assert that the states are those that were saved, bit for bit,
    and that the weights round as the kernel rounds.
    """
    assert len(actual) == 4 * len(STATE.master)
    for (name, kind), tensor in actual.items():
        if kind == PARAM:
            bits = STATE.master[name].numpy().view(np.uint32).astype(np.uint64)
            assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), bits + 0x8000 >> 16)
        else:
            wanted = getattr(STATE, kind)[name]
            assert tensor.dtype == torch.float32, (name, kind)
            assert torch.equal(tensor.view(torch.int32), wanted.view(torch.int32)), (name, kind)


@pytest.mark.parametrize("form", [*FORMS, "replicated"])
def test_masters_are_rebuilt_bit_for_bit(form: str, saved: dict[str, Path]) -> None:
    slots = slots_in(saved[form])
    stored = {each.view.low_dtype for (_, state), held in slots.items() for each in held if state == MASTER}
    assert stored == {"float32" if form in ("fully_reshardable", "torch") else "int16"}
    assert_is_state(states_in(saved[form]))


@pytest.mark.parametrize(
    ("form", "to"),
    [
        ("dp_reshardable", "torch_dist"),
        ("fully_reshardable", "torch_dist"),
        ("torch", "torch"),
    ],
)
def test_another_layout_has_whole_masters(form: str, to: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """From TP2 PP2 to one rank, in both formats, where Megatron's own optimizer takes them."""
    plan = reshard(saved[form], tmp_path / "one", to=to)
    assert sum("remainders of the weights, are written whole" in note for note in plan.notes) == 1
    assert_is_state(states_in(tmp_path / "one"))
    assert verify(saved[form], tmp_path / "one").equal
    load = load_mp_rank if to == "torch" else load_with_optimizer
    (loaded,) = run_ranks(1, lambda: load(FULL, STATE, tmp_path / "one" / "iter_0000010", distributed=True))
    # the fixture takes weights to be rounded to even
    assert [name for name in loaded.differing if "(" in name] == []
    assert len(loaded.steps) == len(STATE.master)


@pytest.mark.parametrize("form", ["dp_reshardable", "torch"])
def test_a_flipped_remainder_changes_one_element(form: str, saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[form], tmp_path / "run")
    before = states_in(tmp_path / "run")
    key = next(key for key in before if key[1] == MASTER and "linear_fc2" in key[0])
    slot = slots_in(tmp_path / "run")[key][-1]
    with slot.view.path.open("r+b") as file:
        file.seek(slot.view.offset)
        kind = np.int16 if slot.view.low_dtype == "int16" else np.float32
        (value,) = np.frombuffer(file.read(kind().itemsize), kind)
        file.seek(slot.view.offset)
        file.write(kind(int(value) ^ 1).tobytes())
    reshard(tmp_path / "run", tmp_path / "one", to="torch_dist")
    after = states_in(tmp_path / "one")
    assert [each for each in before if not torch.equal(before[each], after[each])] == [key]
    differing = before[key].view(torch.int32) ^ after[key].view(torch.int32)
    assert differing.count_nonzero() == 1
    assert differing[slot.box.offsets] == 1


@pytest.mark.parametrize("form", ["fully_reshardable", "torch"])
def test_a_gathered_number_that_is_no_remainder_is_refused(form: str, saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[form], tmp_path / "run")
    slots = slots_in(tmp_path / "run")
    view = next(held[-1].view for key, held in slots.items() if key[1] == MASTER and "linear_fc2" in key[0])
    with view.path.open("r+b") as file:
        file.seek(view.end - 4)
        file.write(np.float32(0.25).tobytes())
    with pytest.raises(ConvertError, match="no 16-bit remainder"):
        reshard(tmp_path / "run", tmp_path / "one")
    assert not (tmp_path / "one").exists()
    reshard(tmp_path / "run", tmp_path / "one", optimizer=False)


def with_args(path: Path, destination: Path, **args: Any) -> Path:
    """Return a copy of a run in `torch_dist` whose stored arguments say something else."""
    shutil.copytree(path, destination)
    file = destination / "iter_0000010" / "common.pt"
    content = torch.load(file, weights_only=False)
    vars(content["args"]).update(args)
    torch.save(content, file)
    return destination


def test_what_may_have_been_shifted_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    """Megatron Core gathers several buckets to shifted places, and nothing would show it."""
    run = with_args(saved["fully_reshardable"], tmp_path / "run", overlap_grad_reduce=True)
    with pytest.raises(ConvertError, match="gathered from several buckets"):
        reshard(run, tmp_path / "one")


def test_numbers_of_another_optimizer_are_no_remainders(saved: dict[str, Path], tmp_path: Path) -> None:
    run = with_args(saved["fully_reshardable"], tmp_path / "run", use_precision_aware_optimizer=False)
    with pytest.raises(ConvertError, match="does not round to the weight"):
        reshard(run, tmp_path / "one")


def test_the_order_is_proven_by_where_parameters_were_saved(saved: dict[str, Path], tmp_path: Path) -> None:
    """Remainders fit to any weight; where a parameter begins is written in the headers, and must be where it should."""
    run = tmp_path / "run"
    shutil.copytree(saved["dp_reshardable"], run)
    file = run / "iter_0000010" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for key, meta in metadata.state_dict_metadata.items():
        if "bucket_idx" in key and key.endswith(".param"):  # two parameters saved as one
            first, second, *rest = sorted(meta.chunks, key=lambda chunk: chunk.offsets)
            meta.chunks[:] = [replace(first, sizes=torch.Size([first.sizes[0] + second.sizes[0]])), *rest]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConvertError, match="order of any known layer spec") as caught:
        reshard(run, tmp_path / "one")
    assert any("does not begin and end where a tensor was saved" in item for item in caught.value.items)


def test_orders_that_fit_alike_are_refused(tmp_path: Path) -> None:
    """Matrices of experts that have one size, of one spec grouped by matrix and of the other by expert."""
    args = {**EXPERTS, "vocab_size": 32, "make_vocab_size_divisible_by": 16, "swiglu": False}
    state = random_state(args)
    run_ranks(1, lambda: save_with_optimizer(args, state, tmp_path / "run", "dp_reshardable", remainders=True))
    with pytest.raises(ConvertError, match="fits in several orders"):
        reshard(tmp_path / "run", tmp_path / "one")


def test_whole_masters_of_a_precision_aware_optimizer(tmp_path: Path) -> None:
    """As one that is offloaded to the CPU keeps them: what is no remainder is not taken for one."""
    args = {**FULL, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
    run_ranks(1, lambda: save_with_optimizer(args, STATE, tmp_path / "run", "fully_reshardable"))
    plan = reshard(tmp_path / "run", tmp_path / "one", tp=2)
    assert not [note for note in plan.notes if "remainders" in note]
    actual = states_in(tmp_path / "one")
    assert all(torch.equal(actual[name, MASTER], master) for name, master in STATE.master.items())
