"""Layouts of Megatron Core's own `sharded_state_dict`, in every dialect, become the same Hugging Face bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.megatron import Common, Dialect, random_weights, save_torch_dist
from mcore_convert import convert, inspect
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.formats.base import Findings
from mcore_convert.formats.torch_dist.checkpoint import open_torch_dist
from mcore_convert.spec import Dims, Index, replicated
from mcore_convert.spec.family import Item
from tests.conftest import HfMaker
from tests.oracle.test_megatron_fixtures import EXPERTS
from tests.ranks import run_ranks
from tests.tensors import assert_same_tensors, hf_tensors

CASES = ["gpt2", "llama-gqa", "llama-attention-bias"]


@pytest.fixture
def source(request: pytest.FixtureRequest, hf_checkpoint: HfMaker) -> Path:
    return hf_checkpoint(request.param)


def model_of(source: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Arguments and global tensors of a Hugging Face fixture, for Megatron to write."""
    model = identify(source)
    args = {**model.args, "padded_vocab_size": model.dims.vocab_size, "tokenizer_type": None}
    return args, {name: tensor.clone() for name, tensor in tensors_of(model)}


@pytest.mark.parametrize("common", ["common.pt", "common_state", "both"])
@pytest.mark.parametrize("dialect", ["stacked", "per_layer", "singleton"])
@pytest.mark.parametrize("source", CASES, indirect=True)
def test_dialects_and_common_state(source: Path, dialect: Dialect, common: Common, tmp_path: Path) -> None:
    args, weights = model_of(source)
    save_torch_dist(args, weights, tmp_path / "dist", dialect=dialect, common=common)
    same = dialect == "singleton" and not args["swiglu"]  # without gated parts and experts it is per_layer
    assert inspect(tmp_path / "dist").dialect == ("per_layer" if same else dialect)
    convert(tmp_path / "dist", tmp_path / "hf", family=identify(source).family.name)
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(source))


@pytest.mark.parametrize("prefix", ["module.", "model.", "language_model.", "module.module."])
def test_wrapper_prefixes(prefix: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa")
    args, weights = model_of(source)
    save_torch_dist(args, weights, tmp_path / "dist", prefix=prefix)
    convert(tmp_path / "dist", tmp_path / "hf")
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(source))


@pytest.mark.parametrize("dialect", ["stacked", "per_layer", "singleton"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_chunks_of_every_rank(dialect: Dialect, tp: int, pp: int, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """The chunk grid and the files are those that a run at this layout leaves."""
    source = hf_checkpoint("llama-gqa", config={"num_hidden_layers": 4, "vocab_size": 512})
    args, weights = model_of(source)

    def save() -> None:
        save_torch_dist(args, weights, tmp_path / "dist", dialect=dialect, tp=tp, pp=pp)

    run_ranks(tp * pp, save)
    assert len(list((tmp_path / "dist").glob("iter_*/*.distcp"))) == tp * pp
    convert(tmp_path / "dist", tmp_path / "hf")
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(source))


@pytest.mark.parametrize("dialect", ["stacked", "per_layer", "singleton"])
@pytest.mark.parametrize("moe_norm", ["local", "transformer_engine"])
def test_the_norm_of_layers_with_experts_has_one_name(dialect: Dialect, moe_norm: Any, tmp_path: Path) -> None:
    """Megatron stores it in two places, depending on the layer spec; readers find it in one."""
    weights = random_weights(EXPERTS)
    save_torch_dist(EXPERTS, weights, tmp_path, dialect=dialect, moe_norm=moe_norm)
    checkpoint = open_torch_dist(tmp_path)
    row = replicated("decoder.layers.{layer}.pre_mlp_layernorm.weight", "hidden")
    dims = Dims.of({**EXPERTS, "vocab_size": 32}, vocab_size=32, padded_vocab_size=32)
    for layer in range(2):
        findings = Findings()
        slots = checkpoint.locate(Item(row, Index(layer)), dims, findings)
        assert not findings.missing
        assert [slot.box.sizes for slot in slots] == [(16,)]
        stored = slots[0].view
        raw = stored.path.read_bytes()[stored.offset : stored.offset + stored.nbytes]
        wanted = weights[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), wanted)
