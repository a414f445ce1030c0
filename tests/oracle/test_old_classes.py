"""Models of Megatron-LM's classes before Core: every spelling and every order of q, k and v, against GPT-2 itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.old_classes import (
    SPELLINGS,
    Model,
    fused,
    gpt2_weights,
    local_tensor,
    random_weights,
    save_345m,
    save_old,
)
from mcore_convert import convert
from mcore_convert.errors import ConfigError, MappingError, UnreadableCheckpoint
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.mp_rank.old_classes import arguments_from, behaved, core_tensors, is_old, named
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.tiling import untiled
from mcore_convert.storage.views import Slot, TensorMeta, View
from tests.tensors import assert_same_tensors, hf_tensors

GPT = Model()
LLAMA = Model(groups=2, positions=None, swiglu=True, bias=False, norm_bias=False, untied=True)


def read(view: View) -> Tensor:
    """Return the elements of a view, by torch."""
    dtype = getattr(torch, view.dtype)
    content = bytearray(view.path.read_bytes()[view.offset :])
    elements = torch.frombuffer(content, dtype=dtype, count=len(content) // dtype.itemsize)
    return elements.as_strided(view.shape, [stride // dtype.itemsize for stride in view.strides])


def assembled(slots: list[Slot]) -> Tensor:
    """Return a local tensor from its slots, which must tile it."""
    boxes = [slot.box for slot in slots]
    shape = tuple(max(box.offsets[dim] + box.sizes[dim] for box in boxes) for dim in range(len(boxes[0].sizes)))
    assert untiled(boxes, shape) is None
    tensor = torch.empty(shape, dtype=getattr(torch, slots[0].view.dtype))
    for view, box in slots:
        place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        tensor[place] = read(view)
    return tensor


def trees(directory: Path) -> list[dict[str, Any]]:
    return [TorchFile(file).tree for file in sorted(directory.glob("mp_rank_*/model_optim_rng.pt"))]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_rank_holds_what_core_would_hold(tmp_path: Path, spelling: str, version: int, tp: int) -> None:
    weights = random_weights(GPT, dtype=torch.bfloat16)
    directory = save_old(tmp_path, weights, GPT, version=version, spelling=SPELLINGS[spelling], tp=tp)
    for rank, tree in enumerate(trees(directory)):
        assert is_old(tree["model"])
        assert tree.get("checkpoint_version", 0) == version
        result = core_tensors(tree["model"], version, heads=GPT.heads // tp, kv_channels=GPT.kv_channels)
        assert sorted(result) == sorted(weights)
        for name, tensor in weights.items():
            assert torch.equal(assembled(result[name]), local_tensor(name, tensor, GPT, 3, tp, rank)), name


@pytest.mark.parametrize("spelling", ["2021", "2023", "transformer_engine"])
def test_groups_gates_and_a_head_of_its_own(tmp_path: Path, spelling: str) -> None:
    weights = random_weights(LLAMA)
    directory = save_old(tmp_path, weights, LLAMA, version=3, spelling=SPELLINGS[spelling], tp=2)
    for rank, tree in enumerate(trees(directory)):
        result = core_tensors(tree["model"], 3.0, heads=2, kv_channels=4)
        assert sorted(result) == sorted(weights)
        for name, tensor in weights.items():
            assert torch.equal(assembled(result[name]), local_tensor(name, tensor, LLAMA, 3, 2, rank)), name


def test_pipeline_stages_number_layers_anew_and_copy_the_tied_embedding(tmp_path: Path) -> None:
    weights = random_weights(GPT)
    directory = save_old(tmp_path, weights, GPT, version=3, spelling=SPELLINGS["2021"], pp=2)
    first, last = (tree["model"] for tree in trees(directory))
    assert is_old(first)
    assert is_old(last)
    tensors = {name: read(view) for name, view in named(last).items()}
    assert torch.equal(tensors["output_layer.weight"], weights["embedding.word_embeddings.weight"])
    assert torch.equal(
        tensors["decoder.layers.0.mlp.linear_fc1.weight"], weights["decoder.layers.1.mlp.linear_fc1.weight"]
    )
    args = arguments_from([first, last], {"num_attention_heads": 4})
    assert (args["num_layers"], args["untie_embeddings_and_output_weights"]) == (2, False)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 29, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def heads_as_computed(version: int, output: Tensor) -> tuple[Tensor, ...]:
    """q, k, v of shape [s, 4 heads, 4 channels] from the output of `query_key_value`, as each version took it apart."""
    if version == 0:  # v1.0: split along the last dimension, then into heads
        return tuple(part.reshape(-1, 4, 4) for part in output.chunk(3, dim=-1))
    if version == 1:  # a8d4781283: [s, np, hn, 3]
        return output.reshape(-1, 4, 4, 3).unbind(dim=-1)
    return output.reshape(-1, 4, 3 * 4).chunk(3, dim=-1)  # v2.0 and later: [s, np, 3 * hn]


@pytest.mark.parametrize("version", [0, 1, 2])
@torch.no_grad()
def test_the_attention_of_each_version_is_that_of_gpt2(tmp_path: Path, version: int) -> None:
    """What that version's model computes from its file, and Core's from what is read, is what GPT-2 computes."""
    model = gpt2()
    weights = gpt2_weights(model.state_dict(), 4, padded_vocab=32)
    directory = save_old(tmp_path, weights, GPT, version=version, spelling=SPELLINGS["2020"])
    (tree,) = trees(directory)
    hidden = torch.randn(5, 16)
    wanted = [part.reshape(5, 4, 4) for part in model.transformer.h[1].attn.c_attn(hidden).chunk(3, dim=-1)]

    name = "decoder.layers.1.self_attention.linear_qkv."
    stored = named(tree["model"])
    output = hidden @ read(stored[name + "weight"]).T + read(stored[name + "bias"])
    for actual, part in zip(heads_as_computed(version, output), wanted, strict=True):
        torch.testing.assert_close(actual, part)

    current = core_tensors(tree["model"], version, heads=4, kv_channels=4)
    output = hidden @ assembled(current[name + "weight"]).T + assembled(current[name + "bias"])
    for actual, part in zip(heads_as_computed(3, output), wanted, strict=True):
        torch.testing.assert_close(actual, part)


def test_the_published_345m_is_a_gpt2(tmp_path: Path) -> None:
    """NVIDIA's file: fp16, an archive of old torch, no arguments, no version, a padded vocabulary."""
    state = gpt2().state_dict()
    directory = save_345m(tmp_path, state, GPT)
    assert directory.name == "release"
    (tree,) = trees(directory)
    assert list(tree) == ["model"]
    args = normalise(arguments_from([tree["model"]], {"num_attention_heads": 4}))
    expected = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 4,
        "max_position_embeddings": 12,
        "padded_vocab_size": 32,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "swiglu": False,
        "bias_gelu_fusion": True,  # the tanh form
        "untie_embeddings_and_output_weights": False,
        "fp16": True,
        "bf16": False,
    }
    assert {name: args[name] for name in expected} == expected

    tensors = core_tensors(tree["model"], 0, heads=4, kv_channels=4)
    assert torch.equal(
        assembled(tensors["embedding.word_embeddings.weight"])[:29], state["transformer.wte.weight"].half()
    )
    for layer in range(2):
        for tail in ("weight", "bias"):
            tensor = assembled(tensors[f"decoder.layers.{layer}.self_attention.linear_qkv.{tail}"])
            q, k, v = tensor.unflatten(0, (4, 3, 4)).unbind(dim=1)
            unpacked = torch.cat([q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)])
            assert torch.equal(unpacked, state[f"transformer.h.{layer}.attn.c_attn.{tail}"].half().movedim(-1, 0))


def test_the_published_345m_becomes_a_hugging_face_model(tmp_path: Path) -> None:
    state = gpt2().state_dict()
    save_345m(tmp_path / "345m", state, GPT)
    with pytest.raises(ConfigError, match="stores no arguments") as error:
        convert(tmp_path / "345m", tmp_path / "hf")
    assert error.value.items == ("--arg num_attention_heads=... is missing",)
    convert(tmp_path / "345m", tmp_path / "hf", given={"num_attention_heads": 4}, vocab_size=29)
    wanted = {key: tensor.half() for key, tensor in state.items() if key != "lm_head.weight"}
    assert_same_tensors(hf_tensors(tmp_path / "hf"), wanted)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_run_with_stored_arguments_becomes_a_hugging_face_model(version: int, pp: int, tmp_path: Path) -> None:
    state = gpt2().state_dict()
    args = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "kv_channels": 4,
        "max_position_embeddings": 12,
        "padded_vocab_size": 32,
        "bias_gelu_fusion": True,
        "tensor_model_parallel_size" if version == 3 else "model_parallel_size": 2,
        "pipeline_model_parallel_size": pp,
    }
    weights = gpt2_weights(state, 4, padded_vocab=32)
    save_old(tmp_path / "old", weights, GPT, version=version, spelling=SPELLINGS["2020"], tp=2, pp=pp, args=args)
    convert(tmp_path / "old", tmp_path / "hf", vocab_size=29)
    assert_same_tensors(hf_tensors(tmp_path / "hf"), {key: state[key] for key in state if key != "lm_head.weight"})


def test_arguments_of_shapes_and_options(tmp_path: Path) -> None:
    directory = save_old(tmp_path, random_weights(LLAMA), LLAMA, version=3, spelling=SPELLINGS["2023"], tp=2)
    model = trees(directory)[0]["model"]
    options = {"num_attention_heads": 4, "max_position_embeddings": 64, "rotary_base": 5000, "kv_channels": None}
    args = arguments_from([model], options, tp=2)
    expected = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 4,
        "max_position_embeddings": 64,
        "padded_vocab_size": 32,
        "position_embedding_type": "rope",
        "rotary_base": 5000,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
    }
    assert {name: args[name] for name in expected} == expected


def test_what_options_must_say_and_must_not(tmp_path: Path) -> None:
    directory = save_old(tmp_path, random_weights(LLAMA), LLAMA, version=3, spelling=SPELLINGS["2021"])
    model = trees(directory)[0]["model"]
    with pytest.raises(ConfigError) as missing:
        arguments_from([model], {})
    assert missing.value.hint == "pass --arg num_attention_heads=... and --arg max_position_embeddings=..."
    options = {"num_attention_heads": 4, "max_position_embeddings": 64}
    with pytest.raises(ConfigError) as wrong:
        arguments_from([model], {**options, "kv_channels": 8, "swiglu": False})
    assert wrong.value.items == ("--arg kv_channels=8: the shapes say 4", "--arg swiglu=False: the shapes say True")
    for heads in (3, 32, 0, "4"):
        with pytest.raises(ConfigError, match="--arg num_attention_heads"):
            arguments_from([model], {**options, "num_attention_heads": heads})


def test_a_stage_alone_is_no_model(tmp_path: Path) -> None:
    directory = save_old(tmp_path, random_weights(GPT), GPT, version=3, spelling=SPELLINGS["2021"], pp=2)
    first, last = (tree["model"] for tree in trees(directory))
    with pytest.raises(UnreadableCheckpoint, match="do not hold a whole model") as error:
        arguments_from([last], {"num_attention_heads": 4})
    assert error.value.items == ("embedding.word_embeddings.weight",)
    layers = first["language_model"]["encoder"]
    for key in [key for key in layers if key.startswith("layers.0.")]:
        layers[key.replace("layers.0.", "layers.1.")] = layers.pop(key)
    with pytest.raises(UnreadableCheckpoint, match="lacks layers"):
        arguments_from([first, last], {"num_attention_heads": 4})


@pytest.mark.parametrize(
    ("place", "key"),
    [
        (("language_model", "embedding", "tokentype_embeddings"), "weight"),
        (("language_model", "pooler"), "dense.weight"),
        (("lm_head",), "dense.weight"),
        (("language_model", "encoder"), "layers.0.inter_attention.query.weight"),
        (("language_model", "encoder"), "layers.0.mlp.local_experts.0.dense_h_to_4h.weight"),
        (("language_model", "encoder"), "layers.0.mlp.router.weight"),
        (("language_model", "decoder"), "layers.0.input_layernorm.weight"),
    ],
)
def test_what_is_no_gpt_is_refused_by_name(place: tuple[str, ...], key: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {"language_model": {"embedding": {}, "encoder": {}}}
    inner = model
    for name in place:
        inner = inner.setdefault(name, {})
    inner[key] = View.of(tmp_path, 0, TensorMeta((4, 4), "float32"))
    with pytest.raises(MappingError) as error:
        core_tensors(model, 3, heads=4, kv_channels=4)
    assert error.value.items == (".".join((*place, key)),)


def test_values_that_are_no_state_dict(tmp_path: Path) -> None:
    view = View.of(tmp_path, 0, TensorMeta((4,), "float32"))
    twice = {"encoder": {"final_norm.weight": view, "final_layernorm.weight": view}}
    with pytest.raises(MappingError, match="twice"):
        named({"language_model": twice})
    with pytest.raises(MappingError) as error:
        named({"language_model": {"encoder": {"final_norm.weight": 3}}})
    assert error.value.items == ("language_model.encoder.final_norm.weight",)
    endless: dict[str, Any] = {}
    endless["language_model"] = endless
    with pytest.raises(UnreadableCheckpoint, match="nested too deeply"):
        named(endless)
    with pytest.raises(UnreadableCheckpoint, match="`checkpoint_version` = 4"):
        core_tensors({"language_model": {}}, 4.0, heads=4, kv_channels=4)


@pytest.mark.parametrize("version", [0, 1])
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, version: int) -> None:
    directory = save_old(tmp_path, random_weights(GPT), GPT, version=version, spelling=SPELLINGS["2020"])
    (tree,) = trees(directory)
    with pytest.raises(MappingError, match=r"not q, k and v of 3 heads of 4 channels") as error:
        core_tensors(tree["model"], version, heads=3, kv_channels=4)
    assert error.value.hint is not None
    assert "--arg num_attention_heads" in error.value.hint


def test_core_models_are_not_taken_for_old_ones(tmp_path: Path) -> None:
    weights = {name: View.of(tmp_path, 0, TensorMeta((), "float32")) for name in random_weights(GPT)}
    assert not is_old(weights)
    assert not is_old({f"language_model.{name}": view for name, view in weights.items()})  # a vision-language model
    assert not is_old({name.replace("decoder.", "encoder."): view for name, view in weights.items()})  # BERT


def test_what_an_old_version_did_without_a_word() -> None:
    assert behaved({"bias_gelu_fusion": True})["bias_gelu_fusion"] is True
    assert behaved({"openai_gelu": False})["bias_gelu_fusion"] is False
    assert behaved({"openai_gelu": True})["bias_gelu_fusion"] is True
    with pytest.raises(ConfigError, match="num_unique_layers"):
        behaved({"num_layers": 4, "num_unique_layers": 2})


def test_orders_differ() -> None:
    """The fixture's own orders are three different ones, so that a reader that ignores the version is found out."""
    q, k, v = torch.arange(3 * 16).reshape(3, 4, 4)
    orders = [fused(q, k, v, version).tolist() for version in range(4)]
    assert orders[0] == list(range(48))
    assert orders[1][:4] == [0, 16, 32, 1]
    assert orders[2][:5] == [0, 1, 2, 3, 16]
    assert orders[2] == orders[3]
