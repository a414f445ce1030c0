"""Statistics and differences are those that torch computes in fp64, whatever the dtype, the format and the layout."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_convert import ConvertError, convert, diff, inspect
from mcore_convert.checkpoints.contents import contents_of
from mcore_convert.checkpoints.identify import open_any
from mcore_convert.comparison.change import Change
from mcore_convert.inspection.outliers import find_outliers
from mcore_convert.inspection.statistics import WeightStatistics, measure, total_rms
from mcore_convert.spec.shard import Box
from mcore_convert.storage import spans
from mcore_convert.storage.blocks import Scratch, read
from mcore_convert.storage.elements import Files
from mcore_convert.storage.spans import paired_spans, parts_of, spans_of
from mcore_convert.storage.views import Slot, TensorMeta, View
from mcore_convert.text.scale import linear, logarithmic
from tests.conftest import HfMaker, real_checkpoint
from tests.tensors import dcp_tensors

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8", "bool")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["as it is", "small steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are read in one step; so that they are read in many, a step is made small."""
    if request.param == "small steps":
        monkeypatch.setattr(spans, "STEP", 3000)
        monkeypatch.setattr(spans, "PART", 7000)


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


def assert_statistics(found: WeightStatistics, tensor: torch.Tensor) -> None:
    """The statistics of a tensor, computed by torch in fp64."""
    values = tensor.double()
    finite = values.isfinite()
    good = values[finite]
    assert found.shape == tuple(tensor.shape)
    assert f"torch.{found.dtype}" == str(tensor.dtype)
    assert found.norm == pytest.approx(float(good.square().sum().sqrt()), rel=2e-6)
    assert found.rms == pytest.approx(float(good.square().mean().sqrt()), rel=2e-6)
    assert found.mean == pytest.approx(float(good.mean()), rel=1e-5, abs=1e-6 * found.rms)
    assert found.largest == float(good.abs().max())
    assert found.zeros == int((values == 0).sum())
    assert found.num_nan == int(values.isnan().sum())
    assert found.num_inf == int(values.isinf().sum())
    if found.largest:
        assert found.largest_at is not None
        assert abs(float(values[found.largest_at])) == found.largest
    if found.first_bad is not None:
        assert not bool(finite[found.first_bad])
    dead = {row for rows in found.dead_rows for row in rows}
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
    found = inspect(path, stats=True)
    assert found.family is None
    assert sorted(w.name for w in found.statistics) == sorted(names)
    for weight in found.statistics:
        if "all bad" in weight.name:
            assert (weight.norm, weight.rms, weight.num_nan) == (0, 0, 90)
            continue
        if "huge" in weight.name and dtype == "float64":  # beyond the squares of fp64
            continue
        assert_statistics(weight, names[weight.name])
        assert weight.layer == int(weight.name.split(".")[2])
    several = [weight for weight in found.statistics if not re.search("huge|tiny", weight.name)]
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
        found = {weight.name: weight for weight in inspect(path, stats=True).statistics}
        assert set(found) == set(wanted)
        for key, tensor in wanted.items():
            assert_statistics(found[key], tensor[:vocab] if key in VOCABULARY else tensor)


@pytest.mark.oracle
def test_statistics_of_optimizer_state() -> None:
    """Of a real run: the master copies and moments that Megatron saved, as torch loads them."""
    path = real_checkpoint("llama_tp2pp2")
    weights = inspect(path, stats=True, optimizer=True).statistics
    found = {(weight.name.removesuffix(f" ({weight.state})"), weight.state): weight for weight in weights}
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
        layers = [w for (name, s), w in found.items() if s == state and without_layer(name) == key]
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
    found = inspect(tmp_path / "fp8", stats=True)
    assert found.notes[-1].startswith("tensors are taken as they are stored: 1 key in ")
    tensors = load_file(tmp_path / "fp8/model.safetensors")
    assert {weight.name for weight in found.statistics} == set(tensors)
    for weight in found.statistics:
        assert_statistics(weight, tensors[weight.name])
    changes = diff(hf_checkpoint("llama-gqa", fill="normal"), tmp_path / "fp8")
    assert [c.name for c in changes.changes if c.num_changed] == [name]
    assert changes.only_in_b == (f"{name}_scale",)


def without_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def test_padding_that_is_not_known_is_told_as_dead_rows(tmp_path: Path, hf_checkpoint: HfMaker) -> None:
    """A run that does not say its vocabulary: its padding is a part of the embedding, and zero."""
    source = hf_checkpoint("llama-gqa", fill="normal", config={"vocab_size": 512}, tokenizer=False)
    shutil.copytree(source, tmp_path / "padded")
    change(tmp_path / "padded", lambda tensors: tensors["model.embed_tokens.weight"][421:].zero_())
    (outlier,) = inspect(tmp_path / "padded", stats=True).outliers
    said = "embedding.word_embeddings.weight: the last 91 rows of 512 are zero, as padding is"
    assert (outlier.kind, outlier.text) == ("dead rows", said)


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
    found = list(find_outliers([statistics_of(number, norm) for number, norm in enumerate(norms)]))
    assert sorted(outlier.layers for outlier in found) == sorted([(layer,), (12,)])


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


# diff


def assert_change(found: Change, a: torch.Tensor, b: torch.Tensor) -> None:
    """The change between two tensors, computed by torch in fp64."""
    first, second = a.double(), b.double()
    good = first.isfinite() & second.isfinite()
    gap = torch.where(good, second - first, 0)
    zero = torch.zeros_like(first)
    norm_a, norm_b = (float(torch.where(good, each, zero).norm()) for each in (first, second))
    if a.dtype == b.dtype:
        size = a.element_size()
        bits = [each.flatten().view(torch.uint8).view(-1, size) for each in (a, b)]
        changed = int((bits[0] != bits[1]).any(-1).sum())
    else:
        changed = int(((first != second) & ~(first.isnan() & second.isnan())).sum())
    assert found.num_changed == changed
    assert found.norms == pytest.approx((norm_a, norm_b), rel=2e-6)
    assert found.norm == pytest.approx(float(gap.norm()), rel=2e-6)
    assert found.relative == pytest.approx(float(gap.norm()) / norm_a if norm_a else 0 if not norm_b else math.inf)
    assert found.largest == pytest.approx(float(gap.abs().max()), rel=1e-6)
    assert found.num_bad == (int((~first.isfinite()).sum()), int((~second.isfinite()).sum()))
    if found.cosine is not None:
        cosine = float((torch.where(good, first, zero) * torch.where(good, second, zero)).sum()) / norm_a / norm_b
        assert found.cosine == pytest.approx(cosine, abs=1e-6)
    if found.largest:
        assert found.largest_at is not None
        assert abs(float(gap[found.largest_at])) == pytest.approx(found.largest, rel=1e-6)
        assert found.values == pytest.approx((float(first[found.largest_at]), float(second[found.largest_at])))


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + [("float32", "bfloat16"), ("float16", "float8_e5m2")])
def test_differences_of_every_dtype(dtypes: tuple[str, str], steps: None, tmp_path: Path) -> None:
    kinds = [getattr(torch, name) for name in dtypes]
    noise = torch.randn(70, 130, generator=torch.Generator().manual_seed(0))
    other = noise + 0.1 * torch.randn(70, 130, generator=torch.Generator().manual_seed(1))
    one = noise.clone()
    one[17, 5] += 2
    pairs = {
        "equal": (noise, noise),
        "near": (noise, other),
        "one": (noise, one),
        "from zero": (torch.zeros(9, 3), torch.ones(9, 3)),
        "to zero": (torch.ones(9, 3), torch.zeros(9, 3)),
        "number": (torch.tensor(1.0), torch.tensor(3.0)),
        "sign of zero": (torch.zeros(5), -torch.zeros(5)),
    }
    cast = {name: (a.to(kinds[0]), b.to(kinds[1])) for name, (a, b) in pairs.items()}
    if kinds[0].is_floating_point:
        bad_a, bad_b = noise.to(kinds[0], copy=True), other.to(kinds[1], copy=True)
        bad_a[1, 1] = bad_b[1, 1] = math.nan  # not a number in both: nothing changed there, bit for bit
        bad_a[2, 2], bad_b[3, 3] = math.nan, math.inf
        cast |= {"bad": (bad_a, bad_b)}
        if dtypes[0] != "float64":  # whose squares are beyond fp64
            tops = [torch.finfo(kind).max for kind in kinds]
            cast["huge"] = torch.full((50, 9), tops[0]).to(kinds[0]), torch.full((50, 9), -tops[1] / 2).to(kinds[1])
    made = [
        unknown_model(tmp_path / side, {name: pair[number] for name, pair in cast.items()})
        for number, side in enumerate("ab")
    ]
    found = diff(*made)
    assert sorted(c.name for c in found.changes) == sorted(cast)
    assert not found.only_in_a + found.only_in_b
    for each in found.changes:
        assert each.dtypes == dtypes
        assert_change(each, *cast[each.name])


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
@pytest.mark.slow
def test_differences_between_formats(name: str, steps: None, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Two models in every pair of formats, transposed and cut differently on both sides, against what torch loads."""
    sources = [hf_checkpoint(name, fill="normal", seed=seed, dtype="bfloat16") for seed in (0, 1)]
    forms = []
    for number, source in enumerate(sources):
        dist, ranks = tmp_path / f"dist{number}", tmp_path / f"ranks{number}"
        convert(source, dist, tp=4)
        convert(source, ranks, to="torch", tp=2, pp=2)
        forms.append((source, dist, ranks))
    vocab = inspect(sources[0]).vocab_size
    wanted = [dict(global_tensors(tmp_path / f"dist{number}/release")) for number in (0, 1)]
    for a in forms[0]:
        for b in forms[1]:
            found = diff(a, b)
            assert [c.name for c in found.changes] == [w.name for w in inspect(a, stats=True).statistics]
            for each in found.changes:
                x, y = (side[each.name] for side in wanted)
                assert_change(each, *((x[:vocab], y[:vocab]) if each.name in VOCABULARY else (x, y)))
    for a, b in zip(forms[0], forms[0][1:], strict=False):
        same = diff(a, b)
        assert (same.num_changed, same.relative, same.share) == (0, 0, 0)


def test_the_whole_of_a_difference(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    a, b = (hf_checkpoint("llama-gqa", fill="normal", seed=seed) for seed in (0, 1))
    found = diff(a, b)
    first, second = (
        torch.cat([t.double().flatten() for t in load_file(p / "model.safetensors").values()]) for p in (a, b)
    )
    assert found.relative == pytest.approx(float((second - first).norm() / first.norm()), rel=1e-6)
    assert found.share == pytest.approx(float((second != first).double().mean()))
    assert found.num_changed == len(found.changes) == 27
    most = found.most_changed(5)
    assert [c.relative for c in most] == sorted((c.relative for c in found.changes), reverse=True)[:5]
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["changes"][3]["relative"] == found.changes[3].relative


def test_config_differences_are_told(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa")
    shutil.copytree(source, tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    assert diff(source, tmp_path / "other").config_differences == (
        f"`rms_norm_eps` is {config['rms_norm_eps']} and 0.25",
    )


def test_weights_of_one_side_only_are_listed(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """A head that was untied, and biases that one side has: what both have is compared."""
    tied = hf_checkpoint("llama-tied", fill="normal")
    shutil.copytree(tied, tmp_path / "untied")
    change(tmp_path / "untied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    config = json.loads((tied / "config.json").read_text())
    (tmp_path / "untied/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    found = diff(tied, tmp_path / "untied")
    assert (found.num_changed, found.only_in_a, found.only_in_b) == (0, (), ("output_layer.weight",))
    assert diff(tmp_path / "untied", tied).only_in_a == ("output_layer.weight",)
    assert "`tie_word_embeddings` is True and False" in found.config_differences


def test_what_must_be_zero_is_not_missed(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Megatron has no place for the bias of `o_proj`; where it is zero, nothing is missing there."""
    source = hf_checkpoint("llama-attention-bias")
    convert(source, tmp_path / "dist")
    found = diff(source, tmp_path / "dist")
    assert (found.num_changed, found.only_in_a, found.only_in_b) == (0, (), ())
    shutil.copytree(source, tmp_path / "other")
    change(tmp_path / "other", lambda t: t["model.layers.1.self_attn.o_proj.bias"].fill_(1))
    assert diff(tmp_path / "other", tmp_path / "dist").only_in_a == ("model.layers.1.self_attn.o_proj.bias",)


@pytest.mark.oracle
def test_optimizer_states_are_compared_on_request() -> None:
    a, b = real_checkpoint("llama_tp2pp2"), real_checkpoint("llama_legacy_tp2pp2")
    assert {change.state for change in diff(a, b).changes} == {"param"}
    found = diff(a, b, optimizer=True)
    assert {change.state for change in found.changes} == {"param", "master", "exp_avg", "exp_avg_sq"}
    assert len(found.changes) == 4 * 27


def test_other_models_are_refused(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    llama = hf_checkpoint("llama-gqa")
    with pytest.raises(ConvertError, match="the models have different sizes") as caught:
        diff(llama, hf_checkpoint("llama-mha"))
    assert "num_query_groups: 4 and 8" in caught.value.items
    with pytest.raises(ConvertError, match="a `llama` cannot be compared with a `gpt2`"):
        diff(llama, hf_checkpoint("gpt2"))
    unknown = [unknown_model(tmp_path / n, {"a.weight": torch.ones(size)}) for n, size in (("x", 3), ("y", 4))]
    with pytest.raises(ConvertError, match="weights of different shapes") as caught:
        diff(*unknown)
    assert caught.value.items == ("a.weight: [3] and [4]",)
    with pytest.raises(ConvertError, match="is no `llama`, and of no family that is known"):
        diff(llama, unknown[0])


def test_a_file_that_was_cut_off_is_told(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Shortened between the reading of its header and that of its tensors, as by a run that writes there."""

    shutil.copytree(hf_checkpoint("llama-gqa"), tmp_path / "model")
    contents = contents_of(open_any(tmp_path / "model"))
    file = tmp_path / "model/model.safetensors"
    with file.open("r+b") as out:
        out.truncate(file.stat().st_size // 2)
    with pytest.raises(ConvertError, match="became shorter while it was read"):
        measure(contents)


# runs


Plan = tuple[tuple[int, ...], list[Box], tuple[int, ...], bool]


@st.composite
def plans_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Plan:
    """A grid of boxes that tile a shape, the order in which they are stored, and whether each is transposed."""
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        spans = list(itertools.pairwise(cuts))
        boxes = [Box((*b.offsets, low), (*b.sizes, high - low)) for b in boxes for low, high in spans]
    return shape, boxes, tuple(draw(st.permutations(range(len(boxes))))), draw(st.booleans())


def stored(content: np.ndarray[Any, Any], plan: Plan, path: Path) -> list[Slot]:
    """Write a tensor as its boxes, one after the other, and say where each is."""
    _, boxes, order, transposed = plan
    slots, data = [], b""
    for number in order:
        box = boxes[number]
        part = content[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        kept = part.T if transposed else part
        view = View.of(path, len(data), TensorMeta(kept.shape, "int32"))
        slots.append(Slot(view.transposed if transposed else view, box))
        data += np.ascontiguousarray(kept).tobytes()
    path.write_bytes(data)
    return slots


@given(data=st.data(), step=st.sampled_from([1, 8, 40, 1 << 20]))
@settings(deadline=None, max_examples=60)
def test_every_element_is_in_one_place_of_one_run(
    data: st.DataObject, step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However a tensor is cut, stored and turned on either side: each element is met once, beside its partner."""
    folder = tmp_path_factory.mktemp("runs")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    first, second = data.draw(plans_of(shape)), data.draw(plans_of(shape))
    content = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    mine, theirs = stored(content, first, folder / "a"), stored(content + 1000, second, folder / "b")
    with pytest.MonkeyPatch.context() as patch, Files() as files:
        patch.setattr(spans, "STEP", step)
        patch.setattr(spans, "PART", 3 * step)
        for made in (spans_of(mine), paired_spans(mine, theirs)):
            seen = []
            for part in parts_of(made):
                for block in part.blocks:
                    values = [read(files, v, block, Scratch(), "x").exact.astype(int) for v in part.span.views]
                    for number, value in enumerate(values[0]):
                        place = part.span.place(block.start + number)
                        assert content[place] == value
                        assert all(other[number] == value + 1000 for other in values[1:])
                        seen.append(place)
            assert sorted(seen) == sorted(np.ndindex(shape))


def test_what_lies_together_is_one_run(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """The queries of all groups stand one after the other in Hugging Face's tensor: they are read at once."""

    source = contents_of(open_any(hf_checkpoint("llama-gqa")))
    (qkv,) = [t for t in source.tensors if t.name == "decoder.layers.0.self_attention.linear_qkv.weight"]
    assert len(qkv.slots) == 3 * 4
    assert len(spans_of(qkv.slots)) <= 3


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
