"""Finding the family of a checkpoint, where Megatron cannot tell several apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from converters import gpt2, llama
from fixtures.megatron import save_torch_dist
from mcore_convert import convert, inspect, verify
from mcore_convert.checkpoints import families
from mcore_convert.checkpoints.identify import identify
from mcore_convert.comparison.logits import tensors_of
from mcore_convert.errors import ConfigError
from mcore_convert.spec import QKV, Concat, ConfigMapping, Family, Fused
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.config.fields import constant, query_groups, same
from tests.conftest import HfMaker

QKV_BIAS, O_BIAS = "self_attention.linear_qkv.bias", "o_proj.bias"


def like_llama(name: str, prevalence: int = 0, **changes: Any) -> Family:
    """Return a family that Megatron cannot tell from Llama."""
    architectures = (f"{name.capitalize()}ForCausalLM",)
    config = replace(llama.CONFIG, model_type=name, architectures=architectures, dialects=())
    family = replace(llama.FAMILY, name=name, architectures=architectures, config=config, prevalence=prevalence)
    return replace(family, **changes)


def with_biases(name: str) -> Family:
    """Return a family as Qwen2: always with biases of q, k and v, never with one of the output."""
    fields = (
        same("intermediate_size", "ffn_hidden_size", default=11008),
        same("max_position_embeddings", "max_position_embeddings", default=2048),
        query_groups(),
        constant(add_qkv_bias=True),
        *llama.SHARED,
    )
    rows = [
        replace(row, when=lambda dims: True) if row.name.endswith(QKV_BIAS) else row
        for row in llama.FAMILY.weights
        if not row.name.endswith(O_BIAS)
    ]
    architectures = (f"{name.capitalize()}ForCausalLM",)
    return like_llama(name, config=ConfigMapping(name, architectures, fields), weights=tuple(rows))


def fused(name: str) -> Family:
    """Return a family as Phi-3: Llama with its own names of fused weights."""
    layer = "model.layers.{layer}."
    names: dict[str, Any] = {
        "self_attention.linear_qkv.weight": ((f"{layer}self_attn.qkv_proj.weight",), Fused(QKV())),
        "mlp.linear_fc1.weight": ((f"{layer}mlp.gate_up_proj.weight",), Fused(Concat())),
    }
    rows = []
    for row in llama.FAMILY.weights:
        result = next((new for end, new in names.items() if row.name.endswith(end)), None)
        rows.append(row if result is None else replace(row, hf=result[0], pack=result[1]))
    return like_llama(name, weights=tuple(row for row in rows if not row.name.endswith("bias")))


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Register families beside Llama and GPT-2, in this order, as another package would."""

    def put(*others: Family) -> None:
        result = {family.name: family for family in (*others, llama.FAMILY, gpt2.FAMILY)}
        monkeypatch.setattr(families, "families", lambda: result)

    return put


def arguments(**changes: Any) -> dict[str, Any]:
    return normalise(llama.CONFIG.to_megatron({"model_type": "llama", "vocab_size": 7, **changes}))


def test_the_original_configuration_decides_between_twins(install: Install) -> None:
    install(like_llama("yllama"))
    for architecture, name in {"YllamaForCausalLM": "yllama", "LlamaForCausalLM": "llama", "Other": "llama"}.items():
        chosen = families.choose(arguments(), {"architectures": [architecture]})
        assert chosen.family.name == name
        assert (chosen.note is None) == (architecture != "Other")  # the model itself says it


@pytest.mark.parametrize("names", [("aaa", "zzz"), ("zzz", "aaa")])
def test_what_an_export_would_invent_decides_before_what_is_read_most(install: Install, names: Sequence[str]) -> None:
    install(*(with_biases(name) if name == "zzz" else fused(name) for name in names))
    biased, plain = families.choose(arguments(attention_bias=True)), families.choose(arguments())
    assert (biased.family.name, {other.name for other in biased.others}) == ("zzz", {"aaa", "llama"})
    assert "adds no weight that the model lacks" in biased.reason
    assert (plain.family.name, [other.name for other in plain.others]) == ("llama", ["aaa"])
    assert plain.reason == "most programs read its architecture"


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("acme/Phi-30-mini", "phi30"),
        ("meta-llama/Llama-3.1-8B", "llama"),
        ("/data/phi30/corpus/tokenizer", "llama"),  # a folder above is no name of a model
        ("acme/gpt-neox", "llama"),
    ],
)
def test_the_tokenizer_of_the_run_tells_equal_families_apart(install: Install, tokenizer: str, name: str) -> None:
    install(fused("phi30"))
    assert families.choose({**arguments(), "tokenizer_model": tokenizer}).family.name == name


def test_the_configuration_beside_a_tokenizer_says_more_than_its_name(install: Install, tmp_path: Path) -> None:
    install(fused("phi30"))
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "phi30"}))
    chosen = families.choose({**arguments(), "tokenizer_model": str(folder)})
    assert (chosen.family.name, chosen.reason) == ("phi30", f"the run's tokenizer is `{folder}`")


def test_where_nothing_tells_none_is_taken(install: Install) -> None:
    install(like_llama("one", llama.FAMILY.prevalence))
    with pytest.raises(ConfigError, match="nothing tells which it is") as caught:
        families.choose(arguments())
    assert caught.value.items == ("one: OneForCausalLM", f"llama: {', '.join(llama.FAMILY.architectures)}")


def test_a_refusal_tells_what_the_nearest_family_lacks(install: Install) -> None:
    install(with_biases("zzz"))
    with pytest.raises(ConfigError, match="`llama` comes nearest") as caught:
        families.choose({**arguments(), "qk_layernorm": True})
    assert caught.value.items == ("`qk_layernorm` = True",)
    assert "docs/add-a-family.md" in str(caught.value)


def test_a_run_with_biases_becomes_the_model_that_has_them(
    install: Install, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """As Megatron saves it, without a word of where it came from; `--family` still makes a Llama of it."""
    source = hf_checkpoint("llama-attention-bias")
    model = identify(source)
    weights = {name: tensor.clone() for name, tensor in tensors_of(model)}
    args = {**model.args, "padded_vocab_size": model.dims.vocab_size, "tokenizer_type": None}
    save_torch_dist(args, weights, tmp_path / "run", common="common.pt")
    install(with_biases("aqwen"))
    done = convert(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == ["AqwenForCausalLM"]
    assert not [name for name in identify(tmp_path / "hf").checkpoint.tensors if name.endswith(O_BIAS)]
    [note] = [note for note in done.notes if "taken for" in note]
    assert note == (
        "taken for a `aqwen`: its export adds no weight that the model lacks, and loses none; `llama` would fit too, "
        "and --family chooses"
    )
    assert note in inspect(tmp_path / "run").notes
    assert verify(tmp_path / "hf", tmp_path / "run").equal
    assert verify(tmp_path / "run", source).equal  # whose family it is compared in
    convert(tmp_path / "run", tmp_path / "llama", family="llama")
    assert verify(tmp_path / "llama", source).equal
