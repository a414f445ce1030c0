"""Statistics and differences are those that torch computes in fp64, whatever the dtype, the format and the layout."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_convert import convert, diff, inspect
from mcore_convert.inspection.outliers import find_outliers
from mcore_convert.inspection.statistics import WeightStatistics, total_rms
from mcore_convert.text.scale import linear, logarithmic
from tests.conftest import HfMaker, real_checkpoint
from tests.tensors import dcp_tensors

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8", "bool")


Tensors = dict[str, torch.Tensor]


def global_tensors(release: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and global tensor of every weight of a stacked `torch_dist` directory, as torch loads it; one a layer."""
    for key, tensor in dcp_tensors(release).items():
        if "_extra_state" in key or key.startswith("optimizer.") or tensor.dtype == torch.uint8:
            continue
        if key.startswith("decoder.layers."):
            for layer, each in enumerate(tensor):
                yield key.replace("decoder.layers.", f"decoder.layers.{layer}."), each
        else:
            yield key, tensor


def assert_statistics(result: WeightStatistics, tensor: torch.Tensor) -> None:
    """Compute the statistics of a tensor by torch in fp64, and assert that they are these."""
    values = tensor.double()
    finite = values.isfinite()
    good = values[finite]
    assert result.shape == tuple(tensor.shape)
    assert f"torch.{result.dtype}" == str(tensor.dtype)
    assert result.norm == pytest.approx(float(good.square().sum().sqrt()), rel=2e-6)
    assert result.rms == pytest.approx(float(good.square().mean().sqrt()), rel=2e-6)
    assert result.mean == pytest.approx(float(good.mean()), rel=1e-5, abs=1e-6 * result.rms)
    assert result.largest == float(good.abs().max())
    assert result.zeros == int((values == 0).sum())
    assert result.num_nan == int(values.isnan().sum())
    assert result.num_inf == int(values.isinf().sum())
    if result.largest:
        assert result.largest_at is not None
        assert abs(float(values[result.largest_at])) == result.largest
    if result.first_bad is not None:
        assert not bool(finite[result.first_bad])
    dead = {row for rows in result.dead_rows for row in rows}
    if values.dim() > 1:
        assert dead == set(torch.nonzero((values == 0).flatten(1).all(1)).flatten().tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_every_dtype(dtype: str, steps: None, tmp_path: Path) -> None:
    """Of a model that no family knows, tensor by tensor: huge and tiny values, zeros, dead rows, NaN and infinity."""
    kind = getattr(torch, dtype)
    noise = torch.randn(70, 130, generator=torch.Generator().manual_seed(0))
    tensors = {"normal": noise, "flat": noise[0] * 3, "number": torch.tensor(-2.5), "zero": torch.zeros(40, 50)}
    tensors |= {"dead": noise.clone(), "sparse": noise * (noise > 1)}
    tensors["dead"][[3, 4, 69]] = 0
    tensors["dead"][3] *= -1
    cast = {name: tensor.to(kind) for name, tensor in tensors.items()}
    if kind.is_floating_point:
        largest, smallest = torch.finfo(kind).max, torch.finfo(kind).smallest_normal
        cast |= {"tiny": (noise.double() * smallest * 4).to(kind), "huge": (noise.sign() * largest * 0.9).to(kind)}
        bad = noise.to(kind, copy=True)
        bad[2, 3], bad[40, 5] = math.nan, math.nan if dtype == "float8_e4m3fn" else -math.inf
        cast |= {"bad": bad, "all bad": torch.full((30, 3), math.nan).to(kind)}
    names = {f"model.layers.{number}.{name}.weight": tensor for number, (name, tensor) in enumerate(cast.items())}
    path = unknown_model(tmp_path / "model", names)
    inspection = inspect(path, stats=True)
    assert inspection.family is None
    assert sorted(w.name for w in inspection.statistics) == sorted(names)
    for weight in inspection.statistics:
        if "all bad" in weight.name:
            assert (weight.norm, weight.rms, weight.num_nan) == (0, 0, 90)
            continue
        if "huge" in weight.name and dtype == "float64":  # beyond the squares of fp64
            continue
        assert_statistics(weight, names[weight.name])
        assert weight.layer == int(weight.name.split(".")[2])
    several = [weight for weight in inspection.statistics if not re.search("huge|tiny", weight.name)]
    values = torch.cat([names[weight.name].double().flatten() for weight in several])
    assert total_rms(several) == pytest.approx(float(values[values.isfinite()].square().mean().sqrt()), rel=2e-6)


def unknown_model(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    apart = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(apart, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"architectures": ["NovelForCausalLM"], "model_type": "novel"}))
    return path


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
@pytest.mark.slow
def test_statistics_in_every_format(name: str, steps: None, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Global tensors have the same values wherever they lie, and they are those that torch loads."""
    source = hf_checkpoint(name, fill="normal", dtype="bfloat16")
    convert(source, tmp_path / "dist", tp=4)
    convert(source, tmp_path / "ranks", to="torch", tp=2, pp=2, vpp=2)
    vocab = inspect(source).vocab_size
    wanted = dict(global_tensors(tmp_path / "dist/release"))
    for path in (source, tmp_path / "dist", tmp_path / "ranks"):
        actual = {weight.name: weight for weight in inspect(path, stats=True).statistics}
        assert set(actual) == set(wanted)
        for key, tensor in wanted.items():
            assert_statistics(actual[key], tensor[:vocab] if key in VOCABULARY else tensor)


@pytest.mark.oracle
def test_statistics_of_optimizer_state() -> None:
    """Of a real run: the master copies and moments that Megatron saved, as torch loads them."""
    path = real_checkpoint("llama_tp2pp2")
    weights = inspect(path, stats=True, optimizer=True).statistics
    result = {(weight.name.removesuffix(f" ({weight.state})"), weight.state): weight for weight in weights}
    assert {weight.state for weight in weights} == {"param", "master", "exp_avg", "exp_avg_sq"}
    norms: dict[tuple[str, str], float] = {}
    for key, tensor in dcp_tensors(path / "iter_0000010").items():
        for state, stored in (("master", "fp32_param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            prefix = f"optimizer.state.{stored}."
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                rows = 500 if name in VOCABULARY else None  # the state of padded rows is no part of the global tensor
                norms[name, state] = float(tensor[:rows].double().norm())
    assert len(norms) > 10
    for (key, state), norm in norms.items():
        layers = [w for (name, s), w in result.items() if s == state and without_layer(name) == key]
        assert layers, key
        assert math.hypot(*(w.norm for w in layers)) == pytest.approx(norm, rel=1e-5), key


def test_a_quantised_model_is_taken_as_it_is_stored(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """A Llama in fp8 with a scale beside each weight: no family has a place for the scales, but they have values."""
    shutil.copytree(hf_checkpoint("llama-gqa", fill="normal"), tmp_path / "fp8")
    name = "model.layers.1.mlp.down_proj.weight"

    def quantise(tensors: Tensors) -> None:
        tensors[f"{name}_scale"] = torch.tensor(448 / float(tensors[name].abs().max()))
        tensors[name] = (tensors[name] * tensors[f"{name}_scale"]).to(torch.float8_e4m3fn)

    change(tmp_path / "fp8", quantise)
    inspection = inspect(tmp_path / "fp8", stats=True)
    assert inspection.notes[-1].startswith("tensors are taken as they are stored: 1 key in ")
    tensors = load_file(tmp_path / "fp8/model.safetensors")
    assert {weight.name for weight in inspection.statistics} == set(tensors)
    for weight in inspection.statistics:
        assert_statistics(weight, tensors[weight.name])
    changes = diff(hf_checkpoint("llama-gqa", fill="normal"), tmp_path / "fp8")
    assert [c.name for c in changes.changes if c.num_changed] == [name]
    assert changes.only_in_b == (f"{name}_scale",)


def without_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def test_padding_that_is_not_known_is_reported_as_dead_rows(tmp_path: Path, hf_checkpoint: HfMaker) -> None:
    """A run that does not say its vocabulary: its padding is a part of the embedding, and zero."""
    source = hf_checkpoint("llama-gqa", fill="normal", config={"vocab_size": 512}, tokenizer=False)
    shutil.copytree(source, tmp_path / "padded")
    change(tmp_path / "padded", lambda tensors: tensors["model.embed_tokens.weight"][421:].zero_())
    (outlier,) = inspect(tmp_path / "padded", stats=True).outliers
    message = "embedding.word_embeddings.weight: the last 91 rows of 512 are zero, as padding is"
    assert (outlier.kind, outlier.text) == ("dead rows", message)


def change(path: Path, function: Callable[[Tensors], object]) -> Path:
    """Change the weights of a directory in place."""
    tensors = load_file(path / "model.safetensors")
    function(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_outliers_are_named(tmp_path: Path) -> None:
    """Twelve layers, of which some stand out; the worst comes first, each in words."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.layers.{n}.up.weight": torch.randn(60, 50, generator=generator) for n in range(12)}
    tensors |= {f"model.layers.{n}.bias": torch.zeros(7) for n in range(12)}
    tensors["model.layers.3.up.weight"][5, 7] = math.nan
    tensors["model.layers.4.up.weight"] *= 4
    tensors["model.layers.5.up.weight"] *= 1.1  # no reason for a word
    tensors["model.layers.7.up.weight"][[2, 8, 9]] = 0
    tensors["model.layers.9.up.weight"][1, 2] = -500.0
    tensors["model.layers.10.up.weight"][30:] *= (torch.arange(50) < 25).float()
    outliers = inspect(unknown_model(tmp_path / "model", tensors), stats=True).outliers
    up = "model.layers.{layer}.up.weight"
    assert [(o.kind, o.weight, o.layers) for o in outliers] == [
        ("nan", up, (3,)),
        ("zero", "model.layers.{layer}.bias", tuple(range(12))),
        ("dead rows", up, (7,)),
        ("zeros", up, (10,)),
        ("norm", up, (4,)),
        ("norm", up, (9,)),
        ("peak", up, (9,)),
    ]
    texts = [outlier.text for outlier in outliers]
    assert texts[0] == "model.layers.3.up.weight: 1 element is NaN, at [5, 7]"
    assert texts[1] == "model.layers.{0...11}.bias: all zero"
    assert texts[2] == "model.layers.7.up.weight: 3 rows of 60 are zero: 2, 8-9"
    assert texts[3] == "model.layers.10.up.weight: 25% of its elements are zero"
    assert texts[4].startswith("model.layers.4.up.weight: norm ")
    times = float(texts[4].split(", ")[1].split(" times")[0])
    assert times == pytest.approx(4, rel=0.1)
    assert "times what neighbouring layers suggest (robust z = +" in texts[4]
    assert texts[-1].startswith("model.layers.9.up.weight: 500 at [1, 2] is 54 times its rms")


def test_layers_that_are_alike_do_not_stand_out() -> None:
    alike = [statistics_of(layer, 1 + 1e-6 * layer) for layer in range(20)]
    assert list(find_outliers(alike)) == []
    few = [statistics_of(layer, 100.0**layer) for layer in range(4)]
    assert list(find_outliers(few)) == []  # too few to say what is usual
    for trend in (
        lambda n: 1.2**n,
        lambda n: 0.9**n,
        lambda n: 1 + 0.5 * math.sin(n / 5),
        lambda n: 5 * math.exp(-n / 3) + 1,
    ):
        assert list(find_outliers([statistics_of(layer, trend(layer)) for layer in range(30)])) == []


@pytest.mark.parametrize("layer", [0, 1, 15, 28, 29])
@pytest.mark.parametrize("factor", [0.4, 1.6])
def test_a_layer_off_a_trend_stands_out(layer: int, factor: float) -> None:
    """At the ends too, and beside another that is off."""
    norms = [1.1**n * (1 + 0.01 * (-1) ** n) for n in range(30)]
    norms[layer] *= factor
    norms[12] *= 9
    result = list(find_outliers([statistics_of(number, norm) for number, norm in enumerate(norms)]))
    assert sorted(outlier.layers for outlier in result) == sorted([(layer,), (12,)])


def test_an_expert_is_compared_with_the_others() -> None:
    experts = [
        dataclasses.replace(statistics_of(layer, 1.1**layer * (3 if (layer, expert) == (4, 2) else 1)), expert=expert)
        for layer in range(8)
        for expert in range(4)
    ]
    (outlier,) = find_outliers(experts)
    assert outlier.layers == (4,)
    assert "norm 4.39, 3 times what the experts of neighbouring layers suggest" in outlier.text


def statistics_of(layer: int, norm: float) -> WeightStatistics:
    name = "decoder.layers.{layer}.weight"
    place = (layer, None, "param", (10,), "float32")
    return WeightStatistics(name, name, *place, norm, 0.0, norm / 2, (0,), 0, 0, 0, (), None)


# scales


def test_scales() -> None:
    assert logarithmic([1, 2, 4, 8], 8) == [1, 3, 6, 8]
    assert logarithmic([1.0, 1.001, 0, None, math.nan, math.inf], 8) == [4, 5, 0, None, None, 8]
    assert logarithmic([0.0, None], 8) == [0, None]
    assert linear([0, 0.5, 1.0, None], 4) == [0, 3, 4, None]
    assert linear([0.1], 10, top=1.0) == [2]
    assert linear([0.0, 0.0], 4) == [0, 0]
    many = logarithmic([2.0**n for n in range(80)], 8)
    assert many == sorted(many, key=lambda step: step or 0)
    assert set(many) == set(range(1, 9))
