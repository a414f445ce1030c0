"""Rank files of the model classes before Megatron Core, opened as any other: with stored arguments, and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.old_classes import SPELLINGS, Model, random_weights, save_old
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.megatron.modules import LOCAL
from mcore_convert.formats.mp_rank.directory import open_mp_rank
from mcore_convert.spec import Layout, gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.names import spell
from mcore_convert.storage.elements import Files, global_tensor
from tests.oracle.test_mp_rank import dims_of, load, resharded

MODEL = Model()
ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
    "padded_vocab_size": 32,
    "position_embedding_type": "learned_absolute",
}
# What shapes do not tell, and the layout: the tensors alone do not say which rank is which.
OPTIONS = {"num_attention_heads": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("spelling", ["2020", "2021", "2023"])
@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("stored", [True, False])
def test_old_models_are_opened_as_any_other(version: int, spelling: str, stored: bool, tmp_path: Path) -> None:
    weights = random_weights(MODEL)
    args = {**ARGS, "model_parallel_size" if version < 3 else "tensor_model_parallel_size": 2}
    args |= {"pipeline_model_parallel_size": 2}
    save_old(
        tmp_path,
        weights,
        MODEL,
        version=version,
        spelling=SPELLINGS[spelling],
        tp=2,
        pp=2,
        args=args if stored else None,
    )
    checkpoint = open_mp_rank(tmp_path, None if stored else OPTIONS)
    assert (checkpoint.layout, checkpoint.implementation) == (Layout(tp=2, pp=2), LOCAL)
    dims = dims_of(checkpoint.args)
    family = gpt.family(arguments.normalise(checkpoint.args))
    sources = find_weights(family, dims, checkpoint)
    with Files() as files:
        for item, slots in sources.slots.items():
            assert item.weight.mcore is not None
            name = spell(item.weight.mcore, item.at)
            name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            tensor = torch.from_numpy(global_tensor(files, slots, family.shape(item.weight, dims)))
            assert torch.equal(tensor.view(torch.int32), weights[name].view(torch.int32)), name


def test_an_old_model_is_written_in_the_current_form(tmp_path: Path) -> None:
    weights = random_weights(MODEL)
    save_old(
        tmp_path / "old",
        weights,
        MODEL,
        version=0,
        spelling=SPELLINGS["2020"],
        tp=2,
        args={**ARGS, "model_parallel_size": 2},
    )
    (result,) = load(resharded(open_mp_rank(tmp_path / "old"), tmp_path / "new", Layout())).values()
    assert result["checkpoint_version"] == 3.0
    held = {key: tensor for key, tensor in result["model"].items() if tensor is not None}
    assert held.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in held.items())


def test_ranks_without_arguments_need_their_layout(tmp_path: Path) -> None:
    save_old(tmp_path, random_weights(MODEL), MODEL, version=0, spelling=SPELLINGS["2020"], tp=2)
    with pytest.raises(UnreadableCheckpoint, match="has 2 ranks and does not store the arguments"):
        open_mp_rank(tmp_path)
