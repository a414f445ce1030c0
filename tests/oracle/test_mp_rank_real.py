"""The format `torch` on checkpoints that Megatron-LM wrote itself: read, proven, rewritten, and bad ones refused."""

from __future__ import annotations

import argparse
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert.checkpoints.checks import prove
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.errors import ConvertError, MappingError, UnreadableCheckpoint, UnsafePickle
from mcore_convert.formats.base import Checkpoint
from mcore_convert.formats.files import pickles
from mcore_convert.formats.megatron.modules import GROUPED, LOCAL, SEQUENTIAL, TRANSFORMER_ENGINE
from mcore_convert.formats.mp_rank.directory import detect, open_mp_rank
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.spec import Layout, gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.names import PARAM
from mcore_convert.storage.elements import Bytes, Files, global_tensor
from mcore_convert.storage.values import round_to
from tests.conftest import real_checkpoint
from tests.oracle.test_mp_rank import assert_same, dims_of, resharded

TE = "transformer_engine_names/"
REAL = {
    "gpt2_legacy_tp2pp2": (Layout(tp=2, pp=2), LOCAL, False),
    "llama_legacy_tp2pp2": (Layout(tp=2, pp=2), LOCAL, True),
    "llama_legacy_vpp": (Layout(pp=2, vpp=2), LOCAL, False),
    "moe_legacy_pp2ep2": (Layout(pp=2, ep=2), LOCAL, False),
    f"{TE}v0.12.0_llama_te_torch": (Layout(tp=2, pp=2), TRANSFORMER_ENGINE, True),
    f"{TE}v0.16.1_llama_te_torch": (Layout(tp=2, pp=2), TRANSFORMER_ENGINE, True),
}
# What belongs to a process of the run: random states, and the record of failures beside them.
OF_A_PROCESS = ("args", "rng_state", "rerun_state_machine")


def load_real(file: Path) -> Any:
    """Return a file through torch, its args through our reader: they name classes that are not installed here."""
    content = torch.load(file, map_location="cpu", weights_only=False, pickle_module=_Lenient)
    return {k: v for k, v in content.items() if k not in OF_A_PROCESS} if "args" in content else content


class _Lenient:
    """pickle, with a stand-in for every class that is not installed."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return super().find_class(module, name)
            except (ImportError, AttributeError):
                return type(name, (pickles.StandIn,), {})

    @staticmethod
    def load(file: io.BufferedIOBase, **_: Any) -> Any:
        return _Lenient.Unpickler(file).load()


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints_are_read_and_proven(name: str) -> None:
    layout, implementation, distributed = REAL[name]
    path = real_checkpoint(name)
    assert detect(open_mp_rank(path).path)
    checkpoint = open_mp_rank(path)
    assert (checkpoint.layout, checkpoint.implementation, checkpoint.experts) == (layout, implementation, SEQUENTIAL)
    assert checkpoint.states == ("param", "master", "exp_avg", "exp_avg_sq")
    assert checkpoint.training is not None
    assert (checkpoint.training.distributed, checkpoint.training.iteration) == (distributed, 10)
    assert [group["step"] for group in checkpoint.training.groups] == [5 if TE in name else 10] * len(
        checkpoint.training.groups
    )
    family = gpt.family(arguments.normalise(checkpoint.args))
    sources = find_weights(family, dims_of(checkpoint.args), checkpoint, checkpoint.states)
    prove(sources.checks)
    with Files() as files:
        proofs = list(checkpoint.proofs())
        assert len(proofs) >= len(checkpoint.tensors) - layout.tp * layout.pp
        for proof in proofs:
            assert (round_to(files.read(proof.master), proof.param.dtype) == files.read(proof.param)).all(), proof


@pytest.mark.parametrize("name", REAL)
def test_a_rewritten_checkpoint_is_the_original(name: str, tmp_path: Path) -> None:
    source = open_mp_rank(real_checkpoint(name))
    again = resharded(source, tmp_path / "again", source.layout)
    originals = sorted(source.path.rglob("*.pt"))
    assert originals
    for file in originals:
        wanted, actual = load_real(file), load_real(again / "iter_0000010" / file.relative_to(source.path))
        for content in (wanted, actual):
            if "model" in content:  # an empty tensor in the original, and what every version accepts in ours
                content["model"] = {k: v for k, v in content["model"].items() if "_extra_state" not in k or v is None}
        assert_same(actual, wanted)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("other", [Layout(), Layout(tp=2), Layout(pp=4), Layout(tp=2, pp=2, vpp=2)], ids=str)
def test_there_and_back_is_the_identity(name: str, other: Layout, tmp_path: Path) -> None:
    source = open_mp_rank(real_checkpoint(name))
    once = resharded(source, tmp_path / "once", source.layout)
    there = open_mp_rank(resharded(source, tmp_path / "there", other))
    assert there.layout == other
    back = resharded(there, tmp_path / "back", source.layout)
    for file in sorted(once.rglob("*.pt")):
        assert file.read_bytes() == (back / file.relative_to(once)).read_bytes(), file


def tensors_of(checkpoint: Checkpoint, args: dict[str, Any], states: tuple[str, ...]) -> dict[str, Bytes]:
    dims = dims_of(args)
    family = gpt.family(arguments.normalise(args))
    sources = find_weights(family, dims, checkpoint, states)
    with Files() as files:
        return {
            str(item): global_tensor(files, slots, family.shape(item.weight, dims))
            for item, slots in sources.slots.items()
        }


@pytest.mark.parametrize("version", ["0.12.0", "0.16.1"])
def test_both_formats_of_one_model_are_equal(version: str) -> None:
    """Written by the same run: bit-equal weights, and the master copies and moments where both formats are read."""
    torch_format = open_mp_rank(real_checkpoint(f"{TE}v{version}_llama_te_torch"))
    torch_dist = open_torch_dist(real_checkpoint(f"{TE}v{version}_llama_te_torch_dist"))
    states = tuple(state for state in torch_format.states if state in torch_dist.states)
    assert PARAM in states
    args = dict(torch_format.args)
    mine, others = tensors_of(torch_format, args, states), tensors_of(torch_dist, args, states)
    assert mine.keys() == others.keys()
    for key, tensor in mine.items():
        assert (tensor == others[key]).all(), key


def test_names_follow_the_layer_spec(tmp_path: Path) -> None:
    """A run of the local spec in the names of Transformer Engine, experts grouped, and back."""
    source = open_mp_rank(real_checkpoint("moe_legacy_pp2ep2"))
    fused = resharded(source, tmp_path / "fused", Layout(), implementation=TRANSFORMER_ENGINE, experts=GROUPED)
    checkpoint = open_mp_rank(fused)
    assert (checkpoint.implementation, checkpoint.experts) == (TRANSFORMER_ENGINE, GROUPED)
    assert list(checkpoint.tensors)[1:8] == [
        "mp_rank_00: decoder.layers.0.self_attention.linear_proj.weight",
        "mp_rank_00: decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "mp_rank_00: decoder.layers.0.self_attention.linear_qkv.weight",
        "mp_rank_00: decoder.layers.0.pre_mlp_layernorm.weight",
        "mp_rank_00: decoder.layers.0.mlp.router.weight",
        "mp_rank_00: decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "mp_rank_00: decoder.layers.0.mlp.experts.linear_fc1.weight1",
    ]
    state = torch.load(fused / "iter_0000010/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    extra = [key.removesuffix("._extra_state") for key in state if key.endswith("_extra_state")]
    assert {key.removeprefix("decoder.layers.0.") for key in extra if "layers.0." in key} == {
        "self_attention.core_attention",
        "self_attention.linear_proj",
        "self_attention.linear_qkv",
        "pre_mlp_layernorm",
        "mlp.experts.linear_fc1",
        "mlp.experts.linear_fc2",
    }
    assert state["decoder.layers.0.mlp.experts.linear_fc1._extra_state"].dtype == torch.uint8
    back = resharded(checkpoint, tmp_path / "back", source.layout, implementation=LOCAL, experts=SEQUENTIAL)
    once = resharded(source, tmp_path / "once", source.layout)
    for file in sorted(once.rglob("*.pt")):
        assert file.read_bytes() == (back / file.relative_to(once)).read_bytes(), file


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy to be damaged."""
    copy = tmp_path / "copy"
    shutil.copytree(real_checkpoint("llama_legacy_tp2pp2"), copy, copy_function=shutil.copyfile)
    for folder in [copy, *copy.rglob("*")]:
        folder.chmod(0o755)
    return copy


def rewrite(file: Path, change: Callable[[dict[Any, Any]], Any]) -> None:
    content = torch.load(file, weights_only=False, map_location="cpu", pickle_module=_Lenient)
    if "args" in content:
        content["args"] = argparse.Namespace(**arguments.plain(vars(content["args"])))
    content.pop("rng_state", None)
    change(content)
    torch.save(content, file)


RANK = "iter_0000010/mp_rank_01_001"


def test_a_missing_rank_is_named(llama: Path) -> None:
    shutil.rmtree(llama / RANK)
    with pytest.raises(UnreadableCheckpoint, match="lacks 1 of the 4 ranks") as caught:
        open_mp_rank(llama)
    assert caught.value.items == ("mp_rank_01_001",)


def test_a_missing_file_is_named(llama: Path) -> None:
    (llama / RANK / "model_optim_rng.pt").unlink()
    with pytest.raises(UnreadableCheckpoint, match=r"mp_rank_01_001/model_optim_rng\.pt"):
        open_mp_rank(llama)


def test_missing_buffers_are_named_when_they_are_needed(llama: Path) -> None:
    (llama / RANK / "distrib_optim.pt").unlink()
    checkpoint = open_mp_rank(llama)
    family = gpt.family(arguments.normalise(checkpoint.args))
    find_weights(family, dims_of(checkpoint.args), checkpoint)
    with pytest.raises(UnreadableCheckpoint, match=r"mp_rank_01_001` has no `distrib_optim.pt`"):
        find_weights(family, dims_of(checkpoint.args), checkpoint, checkpoint.states)


def test_ranks_that_fit_no_layout_are_refused(llama: Path) -> None:
    shutil.copytree(llama / RANK, llama / "iter_0000010/mp_rank_02_000")
    with pytest.raises(UnreadableCheckpoint, match="5 ranks, which do not fit") as caught:
        open_mp_rank(llama)
    assert caught.value.items == ("mp_rank_02_000 has no place",)


def test_ranks_of_different_iterations_are_refused(llama: Path) -> None:
    rewrite(llama / RANK / "model_optim_rng.pt", lambda content: content.update(iteration=20))
    with pytest.raises(UnreadableCheckpoint, match="different iterations") as caught:
        open_mp_rank(llama)
    assert caught.value.items[1] == "iteration 20, checkpoint version 3.0: mp_rank_01_001"


def test_ranks_of_different_runs_are_refused(llama: Path) -> None:
    rewrite(llama / RANK / "model_optim_rng.pt", lambda content: vars(content["args"]).update(num_layers=8))
    with pytest.raises(UnreadableCheckpoint, match="different runs") as caught:
        open_mp_rank(llama)
    assert caught.value.items == ("num_layers: 4 on mp_rank_00_000, 8 on mp_rank_01_001",)


def test_stages_without_their_layers_are_refused(llama: Path) -> None:
    def drop(content: dict[Any, Any]) -> None:
        content["model"] = {k: v for k, v in content["model"].items() if not k.startswith("decoder.layers.1.")}

    for tp in (0, 1):
        rewrite(llama / f"iter_0000010/mp_rank_{tp:02d}_001/model_optim_rng.pt", drop)
    with pytest.raises(UnreadableCheckpoint, match="hold 3 layers, its arguments have 4"):
        open_mp_rank(llama)


def test_a_file_without_arguments_says_so(llama: Path) -> None:
    for file in llama.rglob("model_optim_rng.pt"):
        rewrite(file, lambda content: content.pop("args"))
    with pytest.raises(ConvertError):
        open_mp_rank(llama)
    given = vars(torch.load(real_args(), weights_only=False, pickle_module=_Lenient, map_location="cpu")["args"])
    assert open_mp_rank(llama, arguments.plain(given)).layout == Layout(tp=2, pp=2)


def real_args() -> Path:
    return real_checkpoint("llama_legacy_tp2pp2") / RANK / "model_optim_rng.pt"


def test_a_truncated_file_is_refused(llama: Path) -> None:
    file = llama / RANK / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(UnreadableCheckpoint, match=r"mp_rank_01_001/model_optim_rng.pt` is damaged"):
        open_mp_rank(llama)


def test_foreign_classes_are_refused(llama: Path) -> None:
    rewrite(llama / RANK / "model_optim_rng.pt", lambda content: content.update(more=shutil.rmtree))
    with pytest.raises(UnsafePickle, match=r"shutil.rmtree"):
        open_mp_rank(llama)


def test_optimizer_state_of_another_model_is_refused(llama: Path) -> None:
    def shorten(content: dict[Any, Any]) -> None:
        (tensors,) = content[0].values()
        for state in ("param", "exp_avg", "exp_avg_sq"):
            tensors[state] = tensors[state][:-64].clone()

    rewrite(llama / RANK / "distrib_optim.pt", shorten)
    checkpoint = open_mp_rank(llama)
    with pytest.raises(MappingError, match="does not fit the model's parameters") as caught:
        find_weights(
            gpt.family(arguments.normalise(checkpoint.args)), dims_of(checkpoint.args), checkpoint, checkpoint.states
        )
    assert caught.value.items == ("a buffer has 62720 elements, which is not what 14 parameters take",)


def test_a_transposed_weight_is_named(llama: Path) -> None:
    def transpose(content: dict[Any, Any]) -> None:
        key = "decoder.layers.0.mlp.linear_fc2.weight"
        content["model"][key] = content["model"][key].t().contiguous()

    rewrite(llama / RANK / "model_optim_rng.pt", transpose)
    checkpoint = open_mp_rank(llama)
    with pytest.raises(MappingError) as caught:
        find_weights(gpt.family(arguments.normalise(checkpoint.args)), dims_of(checkpoint.args), checkpoint)
    assert caught.value.items == (
        "mp_rank_01_001: decoder.layers.0.mlp.linear_fc2.weight is [88, 64], the configuration demands [64, 88]",
    )


def test_a_replica_that_drifted_is_named(llama: Path) -> None:
    def nudge(content: dict[Any, Any]) -> None:
        content["model"]["decoder.final_layernorm.weight"][0] += 1

    rewrite(llama / RANK / "model_optim_rng.pt", nudge)
    checkpoint = open_mp_rank(llama)
    sources = find_weights(gpt.family(arguments.normalise(checkpoint.args)), dims_of(checkpoint.args), checkpoint)
    with pytest.raises(ConvertError, match=r"mp_rank_01_001: decoder\.final_layernorm\.weight"):
        prove(sources.checks)
