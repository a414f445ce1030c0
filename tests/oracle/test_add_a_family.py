"""`docs/add-a-family.md`: the families that it makes convert both ways, and its tables leave nothing out."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mcore_convert import convert, verify
from mcore_convert.checkpoints import families
from mcore_convert.spec import Dims, Family, pack, vary
from mcore_convert.spec.config import fields
from tests.kinds import ROOT
from tests.tensors import assert_same_tensors, hf_tensors

PAGE = (ROOT / "docs/add-a-family.md").read_text()
TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def made() -> dict[str, Family]:
    """The families of the page's own code."""
    matched = re.search(r"<!-- file: my_families.py -->\n```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert matched is not None
    module = types.ModuleType("my_families")
    exec(matched[1], module.__dict__)
    return {family.name: family for family in vars(module).values() if isinstance(family, Family)}


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("my_qwen2", (Qwen2Config, Qwen2ForCausalLM), {}),
    ("my_qwen2", (Qwen2Config, Qwen2ForCausalLM), {"tie_word_embeddings": True}),
    ("my_qwen3", (Qwen3Config, Qwen3ForCausalLM), {"head_dim": 16}),
]


@pytest.mark.parametrize(("name", "classes", "changes"), CASES, ids=["qwen2", "qwen2 tied", "qwen3"])
def test_what_a_reader_makes_of_the_page_computes_the_same(
    name: str,
    classes: Any,
    changes: dict[str, Any],
    made: dict[str, Family],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With distinct biases and norms, through Megatron Core's `GPTModel`, and back to the same bytes."""
    installed = {**families.families(), **made}
    monkeypatch.setattr(families, "families", lambda: installed)
    kind, model = classes
    torch.manual_seed(0)
    network = model(kind(**TINY, **changes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    network.save_pretrained(tmp_path / "hf")
    assert '"layer_types"' in (tmp_path / "hf/config.json").read_text()
    done = convert(tmp_path / "hf", tmp_path / "mcore", tp=2, family=name)
    assert done.as_dict()["family"] == name
    result = verify(tmp_path / "hf", tmp_path / "mcore", logits=True, tolerance=2e-5)
    assert result.equal
    assert result.logits is not None
    assert result.logits.within
    convert(tmp_path / "mcore", tmp_path / "back", family=name)
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(tmp_path / "hf"))


def test_the_example_is_short() -> None:
    """Two families in about forty lines."""
    text = PAGE.partition("<!-- file: my_families.py -->")[2].partition("# Arcee: one row")[0]
    assert len([line for line in text.splitlines() if line.strip() and not line.startswith(("#", "```"))]) <= 45


def first_column(heading: str) -> set[str]:
    """Return the names in the first column of the table under this heading."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*?\n\n", PAGE, re.M | re.S)
    assert table is not None, heading
    cells = [line.split("|")[1] for line in table[0].splitlines()[2:] if line]
    return {name for cell in cells for name in re.findall(r"`([\w.]+)", cell)}


def functions(module: types.ModuleType) -> set[str]:
    """Return the public functions that a module defines."""
    result = inspect.getmembers(module, inspect.isfunction)
    return {name for name, value in result if value.__module__ == module.__name__ and not name.startswith("_")}


def test_the_tables_leave_nothing_out() -> None:
    made_fields = {
        name for name in functions(fields) if inspect.signature(getattr(fields, name)).return_annotation == "Field"
    }
    elsewhere = {"rope", "alternating_window", "yarn"}  # each in a module of its own, which the table names
    assert first_column("field") == {*made_fields, *elsewhere}
    sizes = re.findall(r'^ +"(\w+)": ', inspect.getsource(vars(Dims)["_sizes"].func), re.M)
    assert len(sizes) > 10
    assert first_column("word of a shape") == set(sizes)
    assert first_column("how it is cut") == {
        "column",
        "gated_column",
        "segmented",
        "row",
        "replicated",
        "vocab",
        "must_be_zero",
        "buffer",
    }
    packs = [name for name, kind in vars(pack).items() if hasattr(kind, "pieces") and name != "Pack"]
    assert first_column("`pack=`") == set(packs)
    varied = {name for name in first_column("of Llama") if name.startswith("vary.")}
    assert varied == {f"vary.{name}" for name in functions(vary)}
