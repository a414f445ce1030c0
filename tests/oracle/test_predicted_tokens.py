"""Layers that predict further tokens in Hugging Face's files: there, not there, and what repeats in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_convert import ConvertError, convert, diff, inspect, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.errors import MappingError
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, hf_tensors

LAYER = "model.layers.4."  # after the last of the decoder
COPIES = (f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight")
Change = Callable[[dict[str, Tensor]], object]


def changed(source: Path, path: Path, change: Change) -> Path:
    """Return the directory with other tensors."""
    shutil.copytree(source, path)
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")
    return path


def without(*starts: str) -> Change:
    def change(state: dict[str, Tensor]) -> None:
        for key in [key for key in state if key.startswith(starts)]:
            del state[key]

    return change


def test_a_model_that_was_saved_without_them_is_converted_without_them(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = changed(hf_checkpoint("deepseek_v3"), tmp_path / "hf", without(LAYER))
    done = convert(source, tmp_path / "out", tp=2)
    note = "config.json says `num_nextn_predict_layers` = 1, but no file has such layers: converted without them"
    assert note in done.notes
    assert note in inspect(source).notes
    assert identify(tmp_path / "out").args["mtp_num_layers"] is None
    back = convert(tmp_path / "out", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert any("`num_nextn_predict_layers` 1 -> 0" in line for line in back.notes)


def test_copies_may_be_absent_and_are_written(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("glm4_moe")
    bare = changed(source, tmp_path / "bare", without(*COPIES))
    assert inspect(bare).num_parameters == inspect(source).num_parameters
    convert(bare, tmp_path / "out", to="torch", pp=2, ep=2)
    convert(tmp_path / "out", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    assert verify(bare, tmp_path / "out").equal
    assert diff(source, tmp_path / "out").equal


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_is_none_is_refused(copy: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = changed(hf_checkpoint("deepseek_v3"), tmp_path / "hf", lambda state: state[copy].add_(1))
    with pytest.raises(ConvertError, match="differs from the") as caught:
        convert(source, tmp_path / "out")
    assert f"`{copy}`" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{LAYER}eh_proj.weight", lambda state, key: state.pop(key), "missing"),
        (f"{LAYER}hnorm.bias", lambda state, key: state.update({key: state[f"{LAYER}hnorm.weight"].clone()}), "place"),
        (f"{LAYER}self_attn.kv_b_proj.weight", lambda state, key: state.update({key: state[key][1:].clone()}), "shape"),
        (f"{COPIES[0]}", lambda state, key: state.update({key: state[key][1:].clone()}), "shape"),
        ("model.layers.2.self_attn.q_a_proj.weight", lambda state, key: state.pop(key), "missing"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", lambda state, key: state.pop(key), "missing"),
    ],
    ids=["missing", "extra", "misshapen", "misshapen copy", "attention", "bias"],
)
def test_one_tensor_is_refused_by_name(
    name: str, change: Callable[[dict[str, Tensor], str], object], message: str, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = changed(hf_checkpoint("deepseek_v3"), tmp_path / "hf", lambda state: change(state, name))
    with pytest.raises(MappingError, match=message) as caught:
        convert(source, tmp_path / "out")
    assert len(caught.value.items) == 1
    assert name in caught.value.items[0]


def test_another_epsilon_is_reported(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """As of Moonlight, whose norms within latent attention have 1e-6 in transformers all the same."""
    source = hf_checkpoint("deepseek_v3", config={"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5e4})
    done = convert(source, tmp_path / "out", to="torch")
    assert any("have an epsilon of 1e-06 in transformers" in note for note in done.notes)
