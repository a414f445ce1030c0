"""Bad sources: each is refused with a message that says what, where and what to do, and leaves nothing behind.

The messages are in `golden/refusals.txt` as the user sees them. `SRC` and `DST` lie side by side.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert import convert, inspect, verify
from mcore_convert.errors import ConfigError, ConvertError, MappingError, UnreadableCheckpoint
from tests.conftest import HfMaker
from tests.damage import (
    FIRST,
    INDEX,
    ITERATION,
    ONE,
    SECOND,
    SMALL,
    TWO,
    WEIGHTS,
    Damage,
    Q,
    Tensors,
    chunks,
    cut,
    data_file,
    described_as,
    drop_place,
    edit_tensors,
    emptied,
    first_chunk,
    hf_config,
    hf_header,
    hf_index,
    hf_tensors,
    made_a_file,
    metadata,
    moved_by,
    no_args,
    no_common,
    no_tracker,
    nothing,
    overwritten,
    storage,
    stored_args,
    text,
    tracker,
    truncated,
    two_chunks_swapped,
)
from tests.refusals import Golden, golden_texts, refusal, run, tree


@pytest.fixture
def golden() -> Golden:
    """`golden(name)`: the message of this name, as it should be."""
    return golden_texts("refusals.txt").__getitem__


@pytest.fixture
def llama(tmp_path: Path, hf_checkpoint: HfMaker) -> Callable[..., Path]:
    """`llama(**options)`: a copy of a tiny Llama as `SRC`."""

    def make(name: str = "llama-gqa", **options: Any) -> Path:
        made = hf_checkpoint(name, tokenizer=False, config=SMALL, **options)
        return Path(shutil.copytree(made, tmp_path / "SRC"))

    return make


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, hf_checkpoint: HfMaker) -> Path:
    path = tmp_path_factory.mktemp("converted") / "megatron"
    convert(hf_checkpoint("llama-gqa", tokenizer=False, config=SMALL), path, tp=2)
    shutil.rmtree(path / ITERATION / "hf")  # what its architecture is, only the arguments say
    return path


@pytest.fixture
def megatron(tmp_path: Path, converted: Path) -> Path:
    """A copy of a tiny Llama in Megatron's format as `SRC`."""
    return Path(shutil.copytree(converted, tmp_path / "SRC"))


HF: dict[str, tuple[dict[str, Any], Damage]] = {
    "a missing shard": (TWO, lambda path: (path / SECOND).unlink()),
    "an empty safetensors file": (ONE, truncated(0)),
    "a safetensors file cut in its header's length": (ONE, truncated(5)),
    "a safetensors file cut in its header": (ONE, truncated(1000)),
    "a safetensors file cut in its data": (ONE, truncated(-1)),
    "a shard cut in its data": (TWO, lambda path: cut(path / SECOND, -100)),
    "a header longer than the file": (ONE, lambda path: (path / WEIGHTS).write_bytes(b"\xff" * 64)),
    "a header that is no object": (ONE, lambda path: (path / WEIGHTS).write_bytes(struct.pack("<Q", 2) + b"[]")),
    "a header as deep as it is long": (
        ONE,
        lambda path: (path / WEIGHTS).write_bytes(struct.pack("<Q", 10**6) + b"[" * 10**6),
    ),
    "tensors that overlap": (ONE, moved_by(-4, -4)),
    "a hole between tensors": (ONE, moved_by(4, 4)),
    "a tensor longer than its shape": (ONE, moved_by(0, 4)),
    "a negative size": (ONE, described_as(shape=[-64])),
    "an offset beyond all integers": (ONE, described_as(data_offsets=[10**30, 10**30 + 256])),
    "a size that is no integer": (ONE, described_as(shape=[64.0])),
    "an entry that is no object": (ONE, hf_header(lambda header: header.update(x=3))),
    "an entry without a shape": (ONE, hf_header(lambda header: header["model.norm.weight"].pop("shape"))),
    "a dtype that nobody knows": (ONE, described_as(dtype="F4")),
    "an index that is no JSON": (TWO, lambda path: (path / INDEX).write_text("{")),
    "an index without a map": (TWO, hf_index(lambda index: index.pop("weight_map"))),
    "an index with numbers for files": (TWO, hf_index(lambda index: index["weight_map"].update({Q: 1}))),
    "an index naming absent files": (TWO, hf_index(lambda index: index["weight_map"].update({Q: "x.safetensors"}))),
    "an index naming absent tensors": (TWO, hf_index(lambda index: index["weight_map"].update(x=SECOND))),
    "an index naming the wrong file": (
        TWO,
        hf_index(lambda index: index["weight_map"].update({Q: SECOND, "lm_head.weight": FIRST})),
    ),
    "an index that lacks a tensor": (TWO, hf_index(lambda index: index["weight_map"].pop(Q))),
    "an index that leaves its directory": (
        TWO,
        hf_index(lambda index: index["weight_map"].update({Q: "../x.safetensors", "y": "/etc/passwd"})),
    ),
    "extra weights": (
        ONE,
        hf_tensors(
            lambda t: t.update(
                {f"model.layers.{i}.self_attn.{x}_norm.weight": torch.ones(8) for i in range(2) for x in "qk"}
            )
        ),
    ),
    "a missing weight": (ONE, hf_tensors(lambda t: t.pop(Q))),
    "a weight under another name": (ONE, hf_tensors(lambda t: t.update({"query": t.pop(Q)}))),
    "a wrong shape": (ONE, hf_tensors(lambda t: t.update({Q: torch.ones(65, 64)}))),
    "a transposed embedding": (
        ONE,
        hf_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()})),
    ),
    "dtypes mixed inside a weight": (ONE, hf_tensors(lambda t: t.update({Q: t[Q].half()}))),
    "dtypes mixed across layers": (
        ONE,
        hf_tensors(lambda t: t.update({k: t[k].half() for k in t if "layers.1.mlp" in k})),
    ),
    "a quantised weight": (ONE, hf_tensors(lambda t: t.update({k: t[k].char() for k in t if "mlp.down" in k}))),
    "weights of 64 bits": (ONE, hf_tensors(lambda t: t.update({k: t[k].double() for k in t if "mlp.down" in k}))),
    "a quantization_config that is not known": (
        ONE,
        hf_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "a name that a terminal would obey": (ONE, hf_tensors(lambda t: t.update({"\x1b[2J": torch.ones(1)}))),
    "no config.json": (ONE, lambda path: (path / "config.json").unlink()),
    "a config.json that is no object": (ONE, lambda path: (path / "config.json").write_text("[1]")),
    "a config.json that is no JSON": (ONE, lambda path: (path / "config.json").write_text("model: llama")),
    "a config.json that is not text": (ONE, lambda path: (path / "config.json").write_bytes(b"\xff\xfe\xfa")),
    "a config.json with NaN": (ONE, lambda path: (path / "config.json").write_text('{"rope_theta": NaN}')),
    "a config.json as deep as it is long": (ONE, lambda path: (path / "config.json").write_text("[" * 10**6)),
    "an unknown architecture": (ONE, hf_config(architectures=["UnheardOfForCausalLM"], model_type="falcon")),
    "architectures that are no names": (ONE, hf_config(architectures=[["LlamaForCausalLM"]])),
    "an unknown field": (ONE, hf_config(logit_softcap=30.0)),
    "values of the wrong kind": (ONE, hf_config(hidden_size="64", rope_theta=[], rms_norm_eps=10**400)),
    "a model without layers": (ONE, hf_config(num_hidden_layers=0)),
    "more layers than any model has": (ONE, hf_config(num_hidden_layers=10**12)),
    "fewer layers than there are": (ONE, hf_config(num_hidden_layers=1)),
    "a vocabulary of nothing": (ONE, hf_config(vocab_size=0)),
    "heads that cannot be grouped": (ONE, hf_config(num_key_value_heads=3)),
    "weights that are no state dict": (ONE, lambda path: _only(path, torch.tensor([1.0]))),
    "a state dict of nothing": (ONE, lambda path: _only(path, {})),
    "an empty pickle": (ONE, lambda path: _only(path, b"")),
    "no weights": (ONE, lambda path: (path / WEIGHTS).unlink()),
    "an empty directory": (ONE, emptied),
    "a file": (ONE, made_a_file),
}


def _only(path: Path, content: object) -> None:
    """Replace the weights by a pickled file."""
    (path / WEIGHTS).unlink()
    file = path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)


@pytest.mark.parametrize("name", HF)
def test_a_bad_hugging_face_directory_is_refused(name: str, llama: Callable[..., Path], golden: Golden) -> None:
    options, damage = HF[name]
    source = llama(**options)
    damage(source)
    assert refusal(source) == golden(name)


def test_what_megatron_has_no_place_for_is_refused(llama: Callable[..., Path], golden: Golden) -> None:
    source = llama("llama-attention-bias")
    bias = "model.layers.1.self_attn.o_proj.bias"
    edit_tensors(source, lambda t: t[bias][3].fill_(1))
    assert refusal(source) == golden("an o_proj.bias that is not zero")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tied_head_must_be_the_embedding(dtype: torch.dtype, llama: Callable[..., Path], golden: Golden) -> None:
    source = llama("llama-tied", tied_head=True)

    def untie(tensors: Tensors) -> None:
        head = tensors["lm_head.weight"].clone()
        head[3, 3] += 1
        tensors["lm_head.weight"] = head.to(dtype)

    edit_tensors(source, untie)
    assert refusal(source) == golden("a tied head that differs")


MEGATRON: dict[str, Damage] = {
    "a missing .distcp": data_file(Path.unlink),
    "a short .distcp": data_file(lambda file: cut(file, -1000)),
    "a .distcp overwritten with garbage": data_file(overwritten),
    "a .distcp of zeros": data_file(lambda file: file.write_bytes(bytes(file.stat().st_size))),
    "an empty .metadata": text(".metadata", ""),
    "a .metadata of garbage": text(".metadata", "garbage"),
    "a .metadata cut short": lambda path: cut(path / ITERATION / ".metadata", -100),
    "a .metadata of another object": lambda path: (path / ITERATION / ".metadata").write_bytes(pickle.dumps([1])),
    "chunks that overlap": first_chunk(offsets=torch.Size([0, 0, 80])),
    "chunks that leave a hole": chunks(lambda parts: parts.pop(0)),
    "a chunk outside of its tensor": first_chunk(sizes=torch.Size([9, 64, 80])),
    "a chunk of other dimensions": first_chunk(sizes=torch.Size([64, 80])),
    "a chunk that lies nowhere": metadata(drop_place),
    "chunks whose places are swapped": metadata(two_chunks_swapped),
    "a chunk at no place": storage(offset=-1),
    "a chunk at half a place": storage(offset=0.5),
    "a chunk beyond all integers": storage(offset=2**70),
    "a chunk outside of the directory": storage(relative_path="../../../etc/passwd"),
    "a chunk at an absolute path": storage(relative_path="/etc/passwd"),
    "no tracker file": no_tracker,
    "neither tracker file nor iteration": nothing,
    "a tracker file of nonsense": tracker("metadata\n"),
    "an empty tracker file": tracker(""),
    "a tracker file naming an absent iteration": tracker("20"),
    "a tracker file with too many digits": tracker("7" * 300),
    "neither common.pt nor common_state": no_common,
    "a common.pt of garbage": text("common.pt", "garbage"),
    "a common.pt that is no dict": lambda path: torch.save([1, 2], path / ITERATION / "common.pt"),
    "no arguments": no_args,
    "an argument that is missing": stored_args("hidden_size"),
    "an argument of the wrong kind": stored_args(hidden_size="64", rotary_base=[]),
    "arguments with fewer layers": stored_args(num_layers=1),
    "arguments with more layers": stored_args(num_layers=3),
    "arguments with other heads": stored_args(num_attention_heads=4),
    "arguments with another ffn": stored_args(ffn_hidden_size=128),
    "a vocabulary larger than the embedding": stored_args(vocab_size=1000),
    "arguments of experts": stored_args(num_experts=8),
    "the zarr backend": text("metadata.json", '{"sharded_backend": "zarr", "sharded_backend_version": 1}'),
    "a metadata.json that is no JSON": text("metadata.json", "zarr"),
    "a quantised model": lambda path: (path / ITERATION / "modelopt_state").mkdir(),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_a_bad_megatron_directory_is_refused(name: str, megatron: Path, golden: Golden) -> None:
    MEGATRON[name](megatron)
    assert refusal(megatron) == golden(name)


OPTIONS: dict[str, tuple[str, ...]] = {
    "a tp that does not divide": ("--tp", "3"),
    "a pp that does not divide": ("--pp", "3"),
    "an unknown family": ("--family", "falcon"),
    "another family": ("--family", "gpt2"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options_are_refused(name: str, llama: Callable[..., Path], golden: Golden) -> None:
    assert refusal(llama(), *OPTIONS[name]) == golden(name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a vocabulary of an option larger than the embedding", ("--vocab-size", "1000")),
        ("an iteration of a Hugging Face model", ("--iteration", "3")),
        ("a configuration that is not there", ("--hf-config", "nowhere/config.json")),
    ],
)
def test_bad_options_for_megatron_are_refused(
    name: str, options: tuple[str, ...], megatron: Path, golden: Golden
) -> None:
    assert refusal(megatron, *options) == golden(name)


@pytest.mark.parametrize("name", ["./nowhere", "no/such/path", "a..b", "n" * 300])
def test_a_source_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    ended = run("convert", name, tmp_path / "DST")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err in (f"error: `{name}` does not exist\n", f"error: cannot read `{name}`: File name too long\n")
    assert run("inspect", name).code == 1
    assert tree(tmp_path) == {}


def test_the_hub_out_of_reach_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ended = run("convert", "no-such/model", tmp_path / "DST")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: `no-such/model` is no directory, and the Hub cannot be reached: ")
    assert ended.err.count("\n") == 2  # and a hint


WEIRD: tuple[Any, ...] = (None, "x", -1, True, [], {}, 1.5, float("nan"), 1e999, 10**400, 2**63, [[1]], {"a": 1})


@pytest.mark.slow
@pytest.mark.slow
def test_no_value_of_a_configuration_is_a_stack_trace(llama: Callable[..., Path], tmp_path: Path) -> None:
    """Every field with values of every kind: what is not refused must be representable."""
    source = llama()
    config = json.loads((source / "config.json").read_text())
    refused = 0
    for key in (*config, "rope_scaling", "rope_parameters", "head_dim", "sliding_window", "quantization_config"):
        for value in WEIRD:
            (source / "config.json").write_text(json.dumps(config | {key: value}))
            try:
                convert(source, tmp_path / "DST", dry_run=True)
            except ConvertError:
                refused += 1
    assert refused > 200


@pytest.mark.slow
@pytest.mark.slow
def test_no_value_of_an_argument_is_a_stack_trace(megatron: Path, tmp_path: Path) -> None:
    sizes = "vocab_size hidden_size num_attention_heads num_query_groups kv_channels num_layers ffn_hidden_size"
    others = "rotary_base rotary_seq_len_interpolation_factor rope_scaling_factor layernorm_epsilon swiglu"
    refused = 0
    for key in (sizes + " make_vocab_size_divisible_by num_experts normalization " + others).split():
        for value in WEIRD:
            stored_args(**{key: value})(megatron)
            for format_ in ("hf", "torch_dist"):
                try:
                    convert(megatron, tmp_path / "DST", to=format_, dry_run=True)
                except ConvertError:
                    refused += 1
            inspect(megatron)
    assert refused > 200


def test_the_api_raises_by_kind(llama: Callable[..., Path], tmp_path: Path) -> None:
    source = llama()
    with pytest.raises(UnreadableCheckpoint, match="does not exist"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no family `falcon`"):
        convert(source, tmp_path / "DST", family="falcon")
    edit_tensors(source, lambda t: t.pop(Q))
    with pytest.raises(MappingError, match="1 weight of family `llama` is missing") as caught:
        convert(source, tmp_path / "DST")
    assert caught.value.items == (Q,)
    with pytest.raises(MappingError, match="is missing"):
        verify(source, source)
