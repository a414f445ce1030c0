"""Differences of weights: every dtype, every format, all of it, and what one side lacks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_convert import ConvertError, convert, diff, inspect
from mcore_convert.checkpoints.contents import contents_of
from mcore_convert.checkpoints.identify import open_any
from mcore_convert.comparison.change import Change
from mcore_convert.inspection.statistics import measure
from tests.conftest import HfMaker, real_checkpoint
from tests.unit.test_values import DTYPES, VOCABULARY, change, global_tensors, unknown_model

# diff


def assert_change(result: Change, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute the change between two tensors by torch in fp64, and assert that it is this."""
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
    assert result.num_changed == changed
    assert result.norms == pytest.approx((norm_a, norm_b), rel=2e-6)
    assert result.norm == pytest.approx(float(gap.norm()), rel=2e-6)
    assert result.relative == pytest.approx(float(gap.norm()) / norm_a if norm_a else 0 if not norm_b else math.inf)
    assert result.largest == pytest.approx(float(gap.abs().max()), rel=1e-6)
    assert result.num_bad == (int((~first.isfinite()).sum()), int((~second.isfinite()).sum()))
    if result.cosine is not None:
        cosine = float((torch.where(good, first, zero) * torch.where(good, second, zero)).sum()) / norm_a / norm_b
        assert result.cosine == pytest.approx(cosine, abs=1e-6)
    if result.largest:
        assert result.largest_at is not None
        assert abs(float(gap[result.largest_at])) == pytest.approx(result.largest, rel=1e-6)
        assert result.values == pytest.approx((float(first[result.largest_at]), float(second[result.largest_at])))


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
    comparison = diff(*made)
    assert sorted(c.name for c in comparison.changes) == sorted(cast)
    assert not comparison.only_in_a + comparison.only_in_b
    for each in comparison.changes:
        assert each.dtypes == dtypes
        assert_change(each, *cast[each.name])


@pytest.mark.slow
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
            actual = diff(a, b)
            assert [c.name for c in actual.changes] == [w.name for w in inspect(a, stats=True).statistics]
            for each in actual.changes:
                x, y = (side[each.name] for side in wanted)
                assert_change(each, *((x[:vocab], y[:vocab]) if each.name in VOCABULARY else (x, y)))
    for a, b in zip(forms[0], forms[0][1:], strict=False):
        same = diff(a, b)
        assert (same.num_changed, same.relative, same.share) == (0, 0, 0)


def test_the_whole_of_a_difference(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    a, b = (hf_checkpoint("llama-gqa", fill="normal", seed=seed) for seed in (0, 1))
    comparison = diff(a, b)
    first, second = (
        torch.cat([t.double().flatten() for t in load_file(p / "model.safetensors").values()]) for p in (a, b)
    )
    assert comparison.relative == pytest.approx(float((second - first).norm() / first.norm()), rel=1e-6)
    assert comparison.share == pytest.approx(float((second != first).double().mean()))
    assert comparison.num_changed == len(comparison.changes) == 27
    most = comparison.most_changed(5)
    assert [c.relative for c in most] == sorted((c.relative for c in comparison.changes), reverse=True)[:5]
    plain = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert plain["changes"][3]["relative"] == comparison.changes[3].relative


def test_config_differences_are_reported(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
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
    comparison = diff(tied, tmp_path / "untied")
    assert (comparison.num_changed, comparison.only_in_a, comparison.only_in_b) == (0, (), ("output_layer.weight",))
    assert diff(tmp_path / "untied", tied).only_in_a == ("output_layer.weight",)
    assert "`tie_word_embeddings` is True and False" in comparison.config_differences


def test_what_must_be_zero_is_not_missed(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Megatron has no place for the bias of `o_proj`; where it is zero, nothing is missing there."""
    source = hf_checkpoint("llama-attention-bias")
    convert(source, tmp_path / "dist")
    comparison = diff(source, tmp_path / "dist")
    assert (comparison.num_changed, comparison.only_in_a, comparison.only_in_b) == (0, (), ())
    shutil.copytree(source, tmp_path / "other")
    change(tmp_path / "other", lambda t: t["model.layers.1.self_attn.o_proj.bias"].fill_(1))
    assert diff(tmp_path / "other", tmp_path / "dist").only_in_a == ("model.layers.1.self_attn.o_proj.bias",)


@pytest.mark.oracle
def test_optimizer_states_are_compared_on_request() -> None:
    a, b = real_checkpoint("llama_tp2pp2"), real_checkpoint("llama_legacy_tp2pp2")
    assert {change.state for change in diff(a, b).changes} == {"param"}
    comparison = diff(a, b, optimizer=True)
    assert {change.state for change in comparison.changes} == {"param", "master", "exp_avg", "exp_avg_sq"}
    assert len(comparison.changes) == 4 * 27


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


def test_a_file_that_was_cut_off_is_reported(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Shortened between the reading of its header and that of its tensors, as by a run that writes there."""

    shutil.copytree(hf_checkpoint("llama-gqa"), tmp_path / "model")
    contents = contents_of(open_any(tmp_path / "model"))
    file = tmp_path / "model/model.safetensors"
    with file.open("r+b") as out:
        out.truncate(file.stat().st_size // 2)
    with pytest.raises(ConvertError, match="became shorter while it was read"):
        measure(contents)
