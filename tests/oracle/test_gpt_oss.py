"""gpt-oss in its two kinds of files, whose experts lie the other way round, on shapes that are square."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.quantised import mxfp4
from mcore_convert import convert, export, inspect, iter_hf_weights, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, hf_tensors

Tensors = dict[str, torch.Tensor]
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
LAYER = "model.layers.{}.mlp.experts."


@pytest.fixture(scope="module")
def published(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A model as it is published: experts in mxfp4; and what transformers makes of their blocks and scales."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = tmp_path_factory.mktemp("published") / "hf"
    shutil.copytree(hf_checkpoint("gpt_oss", dtype="bfloat16"), path)
    tensors, decoded = load_file(path / "model.safetensors"), Tensors()
    for layer in range(4):
        for seed, (name, rows) in enumerate((("gate_up_proj", 128), ("down_proj", 64))):
            own = LAYER.format(layer) + name
            stored, exact = mxfp4(rows, 64, experts=8, seed=2 * layer + seed)
            del tensors[own]
            tensors |= {own + end: tensor for end, tensor in stored.items()}
            decoded[own] = convert_moe_packed_tensors(stored["_blocks"], stored["_scales"])
            assert torch.equal(decoded[own], exact)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    return path, decoded


@pytest.mark.parametrize(("to", "layout"), [("torch_dist", {"tp": 2}), ("torch", {"tp": 2, "ep": 2})])
def test_experts_of_both_files_are_the_same_weights(
    to: str, layout: dict[str, int], published: tuple[Path, Tensors], tmp_path: Path
) -> None:
    """Rows of Megatron are columns of transformers' tensors: gate those with even numbers, up the others."""
    source, decoded = published
    convert(source, tmp_path / "megatron", to=to, **layout)  # type: ignore[arg-type]
    model = dict(tensors_of(identify(tmp_path / "megatron")))
    for layer in range(4):
        gate_up, down = (decoded[LAYER.format(layer) + name] for name in ("gate_up_proj", "down_proj"))
        for expert in range(8):
            own = f"decoder.layers.{layer}.mlp.experts.experts.{expert}."
            gate, up = gate_up[expert][:, 0::2].T, gate_up[expert][:, 1::2].T
            assert torch.equal(model[own + "linear_fc1.weight"], torch.cat([gate, up]))
            assert torch.equal(model[own + "linear_fc2.weight"], down[expert].T)
            assert not torch.equal(down[expert].T, down[expert])
    assert verify(source, tmp_path / "megatron").equal
    convert(tmp_path / "megatron", tmp_path / "back")
    plain = hf_tensors(tmp_path / "back")
    assert_same_tensors({name: plain[name] for name in decoded}, decoded)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    assert verify(source, tmp_path / "back").equal


def test_transformers_decodes_the_same_model(published: tuple[Path, Tensors], tmp_path: Path) -> None:
    """As it is streamed out of rank files, and as an export proves that it was written."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source, _ = published
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    wanted = dict(model.state_dict())
    convert(source, tmp_path / "megatron", to="torch", tp=2)
    assert_same_tensors(dict(iter_hf_weights(tmp_path / "megatron")), wanted)
    export(tmp_path / "megatron", tmp_path / "exported")
    assert_same_tensors(hf_tensors(tmp_path / "exported"), wanted)


def test_inspect_tells_what_is_there(published: tuple[Path, Tensors]) -> None:
    source, _ = published
    text = str(inspect(source))
    assert "gpt_oss" in text
    assert "mxfp4, groups of 32" in text
