"""Optimizers beside Adam: what Megatron Core saves of SGD, Lion and Muon is read, resharded, and loaded by it again."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fixtures.chained import Format, Kind, load, save
from fixtures.mp_rank import save_mp_rank
from fixtures.optimizer import random_state
from mcore_convert import ConvertError, reshard, verify
from mcore_convert.checkpoints.checks import prove
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.names import PARAM
from mcore_convert.storage.elements import Files, global_tensor
from tests.oracle.test_megatron_fixtures import ARGS, EXPERTS
from tests.ranks import run_ranks

SIZES = {"vocab_size": 32, "make_vocab_size_divisible_by": 16}
MODELS: dict[str, dict[str, Any]] = {"llama": {**ARGS, **SIZES}, "experts": {**EXPERTS, **SIZES}}
FORMATS: tuple[Format, ...] = ("torch_dist", "torch")


def states_in(path: Path) -> dict[tuple[str, str], Tensor]:
    """Return every state of every weight that an optimizer keeps, with what must hold in the data proven."""
    checkpoint = open_mp_rank(path) if list(path.rglob("mp_rank_*")) else open_torch_dist(path)
    assert checkpoint.common.args is not None
    args = arguments.normalise(checkpoint.common.args)
    family, dims = gpt.family(args), Dims.of(args, vocab_size=32, padded_vocab_size=32)
    sources = find_weights(family, dims, checkpoint, checkpoint.states)
    prove(sources.checks)
    result = {}
    with Files() as files:
        for item, slots in sources.slots.items():
            tensor = torch.from_numpy(global_tensor(files, slots, family.shape(item.weight, dims)).copy())
            result[str(item._replace(state=PARAM)), item.state] = tensor.view(getattr(torch, slots[0].view.dtype))
    return result


def wanted(model: str, kind: Kind) -> dict[tuple[str, str], Tensor]:
    """Return the state that was saved: of Muon the matrices inside the layers have a momentum,
    the rest Adam's moments.
    """
    state = random_state(MODELS[model])
    held: dict[tuple[str, str], Tensor] = {}
    for name, master in state.master.items():
        by_muon = "muon" in kind and master.dim() == 2 and name.startswith("decoder.")
        one = {"lion": "exp_avg", "sgd": "momentum_buffer"}.get(kind, "momentum_buffer" if by_muon else None)
        held |= {(name, "param"): master.to(torch.bfloat16), (name, "master"): master}
        held[name, one or "exp_avg"] = state.exp_avg[name]
        if one is None:
            held[name, "exp_avg_sq"] = state.exp_avg_sq[name]
    return held


def assert_is(result: dict[tuple[str, str], Tensor], state: dict[tuple[str, str], Tensor]) -> None:
    assert result.keys() == state.keys()
    for key, tensor in result.items():
        assert tensor.dtype == state[key].dtype, key
        assert torch.equal(tensor, state[key]), key


@pytest.mark.parametrize("to", FORMATS)
def test_muon_there_and_back(to: Format, tmp_path: Path) -> None:
    """TP2, then TP1 PP2 where Megatron Core loads it, then TP2 again."""
    args, state = MODELS["llama"], random_state(MODELS["llama"])
    run_ranks(2, lambda: save(args, "muon", state, tmp_path / "first", to, tp=2))
    assert_is(states_in(tmp_path / "first"), wanted("llama", "muon"))
    reshard(tmp_path / "first", tmp_path / "second", pp=2)
    assert_is(states_in(tmp_path / "second"), wanted("llama", "muon"))
    loaded = run_ranks(2, lambda: load(args, "muon", state, tmp_path / "second" / "iter_0000010", to, pp=2))
    assert [differing for differing, _ in loaded] == [[], []]
    assert sum(count for _, count in loaded) == len(wanted("llama", "muon")) - len(state.master)
    reshard(tmp_path / "second", tmp_path / "third", tp=2)
    assert_is(states_in(tmp_path / "third"), wanted("llama", "muon"))
    assert verify(tmp_path / "first", tmp_path / "third").equal


@pytest.mark.parametrize(("kind", "to"), [("sgd", "torch"), ("lion", "torch_dist")])
def test_one_moment(kind: Kind, to: Format, tmp_path: Path) -> None:
    """In both formats, from one to the other and where it was saved; Megatron Core loads it."""
    args, state = MODELS["llama"], random_state(MODELS["llama"])
    run_ranks(1, lambda: save(args, kind, state, tmp_path / "first", to))
    reshard(tmp_path / "first", tmp_path / "second", tp=2, to="torch" if to == "torch_dist" else "torch_dist")
    assert_is(states_in(tmp_path / "second"), wanted("llama", kind))
    reshard(tmp_path / "second", tmp_path / "third", to=to)
    assert_is(states_in(tmp_path / "third"), wanted("llama", kind))
    ((differing, count),) = run_ranks(1, lambda: load(args, kind, state, tmp_path / "third" / "iter_0000010", to))
    assert (differing, count) == ([], 2 * len(state.master))


@pytest.mark.parametrize(("kind", "to"), [("muon", "torch"), ("layer_wise_muon", "torch_dist")])
def test_experts_are_chained_as_they_were(kind: Kind, to: Format, tmp_path: Path) -> None:
    args, state = MODELS["experts"], random_state(MODELS["experts"])
    run_ranks(2, lambda: save(args, kind, state, tmp_path / "first", to, ep=2))
    assert_is(states_in(tmp_path / "first"), wanted("experts", kind))
    reshard(tmp_path / "first", tmp_path / "second", ep=2, pp=2)
    assert_is(states_in(tmp_path / "second"), wanted("experts", kind))
    loaded = run_ranks(4, lambda: load(args, kind, state, tmp_path / "second" / "iter_0000010", to, ep=2, pp=2))
    assert [differing for differing, _ in loaded] == [[]] * 4
    with pytest.raises(ConvertError, match="another expert parallelism"):
        reshard(tmp_path / "first", tmp_path / "other", pp=2)
    reshard(tmp_path / "first", tmp_path / "other", pp=2, optimizer=False)


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_reshardable"])
def test_muon_chained_with_a_distributed_optimizer(form: str, tmp_path: Path) -> None:
    """Each has its own form of master copies, in what is read and in what is written, where Megatron Core loads it."""
    args, state = MODELS["llama"], random_state(MODELS["llama"])
    kind: Kind = "muon_and_distributed"
    run_ranks(2, lambda: save(args, kind, state, tmp_path / "first", "torch_dist", tp=2, form=form))
    assert_is(states_in(tmp_path / "first"), wanted("llama", "muon"))
    if form == "fully_reshardable":
        return
    reshard(tmp_path / "first", tmp_path / "second")
    assert_is(states_in(tmp_path / "second"), wanted("llama", "muon"))
    ((differing, count),) = run_ranks(
        1, lambda: load(args, kind, state, tmp_path / "second/iter_0000010", "torch_dist")
    )
    assert (differing, count) == ([], len(wanted("llama", "muon")) - len(state.master))


def test_lion_in_flat_buffers(tmp_path: Path) -> None:
    """Its distributed state, which Megatron Core gathers since 0.19, is that of Adam without the second moment."""
    args, state = MODELS["llama"], random_state(MODELS["llama"])
    dtype = torch.bfloat16
    run_ranks(2, lambda: save_mp_rank(args, state, tmp_path / "run", optimizer="distributed", tp=2, dtype=dtype))
    for file in (tmp_path / "run").rglob("*.pt"):
        content = torch.load(file, weights_only=False)
        if file.name == "distrib_optim.pt":
            for tensors in content[0].values():
                del tensors["exp_avg_sq"]
        else:
            for group in content["optimizer"]["optimizer"]["param_groups"]:
                del group["eps"], group["step"]
        torch.save(content, file)
    assert_is(states_in(tmp_path / "run"), wanted("llama", "lion"))
    plan = reshard(tmp_path / "run", tmp_path / "one", to="torch_dist", for_megatron="0.16")
    assert_is(states_in(tmp_path / "one"), wanted("llama", "lion"))
    assert [note for note in plan.notes if "0.19 and later load Lion's" in note]
    reshard(tmp_path / "one", tmp_path / "again", pp=2, to="torch")
    assert_is(states_in(tmp_path / "again"), wanted("llama", "lion"))


def test_a_layer_wise_optimizer_in_rank_files(tmp_path: Path) -> None:
    """What one data-parallel rank has saved is whole, and goes to `torch_dist`; parts of several are refused."""
    args, state = MODELS["experts"], random_state(MODELS["experts"])
    run_ranks(1, lambda: save(args, "layer_wise_muon", state, tmp_path / "one", "torch"))
    run_ranks(2, lambda: save(args, "layer_wise_muon", state, tmp_path / "two", "torch", ep=2))
    reshard(tmp_path / "one", tmp_path / "whole", to="torch_dist")
    assert_is(states_in(tmp_path / "whole"), wanted("experts", "layer_wise_muon"))
    with pytest.raises(ConvertError, match="not written in the format `torch`"):
        reshard(tmp_path / "whole", tmp_path / "again", to="torch")
    with pytest.raises(ConvertError) as caught:
        reshard(tmp_path / "two", tmp_path / "parts", to="torch_dist")
    assert caught.value.items == ("each of 2 data-parallel ranks has a part: `layer_wise_optimizer_*.pt`",)
    reshard(tmp_path / "two", tmp_path / "parts", to="torch_dist", optimizer=False)


def test_moments_of_two_optimizers_or_of_none(tmp_path: Path) -> None:
    """A weight has the moments of one optimizer; one that lacks them is missing, and does not count as another's."""
    args, state = MODELS["llama"], random_state(MODELS["llama"])
    run_ranks(1, lambda: save(args, "muon", state, tmp_path / "run", "torch_dist"))
    file = tmp_path / "run" / "iter_0000010" / ".metadata"
    whole = pickle.loads(file.read_bytes())
    head, fc1 = "optimizer.state.", ".decoder.layers.mlp.linear_fc1.weight"
    for source, target, message in (
        (f"{head}exp_avg.output_layer.weight", f"{head}exp_avg{fc1}", "moments of two optimizers"),
        (f"{head}momentum_buffer{fc1}", None, r"exp_avg.decoder.layers.mlp.linear_fc1.weight"),
        (f"{head}exp_avg_sq.output_layer.weight", None, "exp_avg_sq.output_layer.weight"),
    ):
        metadata = copy.deepcopy(whole)
        tensor = metadata.state_dict_metadata.pop(source)
        if target is not None:
            metadata.state_dict_metadata[target] = tensor
            for index in [index for index in metadata.storage_data if index.fqn == source]:
                metadata.storage_data[MetadataIndex(target, index.offset)] = metadata.storage_data.pop(index)
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ConvertError) as caught:
            reshard(tmp_path / "run", tmp_path / "out")
        assert message in f"{caught.value.message} {caught.value.items}"
