"""Numbers that are none: said with their tensors and counts, refused with `--strict`, and copied bit for bit else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mcore_convert import convert, export, reshard, verify
from mcore_convert.errors import ConvertError
from mcore_convert.storage.blocks import FINITE
from mcore_convert.storage.digests import LARGEST, not_finite
from mcore_convert.storage.values import FP8, as_float
from mcore_convert.storage.views import DTYPE_SIZES
from tests.conftest import HfMaker
from tests.refusals import run

WEIGHTS = "model.safetensors"


def spoilt(source: Path, target: Path, values: dict[str, dict[tuple[int, ...], float]]) -> Path:
    """Return a copy of a directory with other values in some of its tensors."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / WEIGHTS)
    for name, changes in values.items():
        for place, value in changes.items():
            tensors[name][place] = value
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


@pytest.fixture
def gpt2(hf_checkpoint: HfMaker, tmp_path: Path) -> Path:
    """A GPT-2, whose matrices are transposed on the way, with five numbers that are none in two tensors."""
    nan, inf = float("nan"), float("inf")
    return spoilt(
        hf_checkpoint("gpt2", fill="normal"),
        tmp_path / "gpt2",
        {
            "transformer.h.1.mlp.c_proj.weight": {(0, 0): nan, (3, 5): inf, (-1, -1): -inf},
            "transformer.ln_f.bias": {(2,): -nan, (7,): nan},
        },
    )


FOUND = [
    "decoder.layers.1.mlp.linear_fc2.weight: 1 NaN and 2 infinities",
    "decoder.final_layernorm.bias: 2 NaN",
]


@pytest.mark.parametrize("to", [{}, {"to": "torch", "tp": 2, "pp": 2}, {"tp": 2}])
def test_they_are_reported_once_and_refused_with_strict(to: dict[str, object], gpt2: Path, tmp_path: Path) -> None:
    done = convert(gpt2, tmp_path / "dst", **to)  # type: ignore[arg-type]
    (note,) = [note for note in done.notes if "not finite" in note]
    assert note == f"2 tensors hold numbers that are not finite: {'; '.join(FOUND)}"
    assert verify(gpt2, tmp_path / "dst").equal  # they were copied bit for bit
    before = set(tmp_path.iterdir())
    with pytest.raises(ConvertError) as refused:
        convert(gpt2, tmp_path / "strict", strict=True, **to)  # type: ignore[arg-type]
    assert refused.value.message == "2 tensors hold numbers that are not finite"
    assert list(refused.value.items) == FOUND
    assert refused.value.hint == "leave out --strict to copy them as they are"
    assert set(tmp_path.iterdir()) == before


def test_reshard_and_export_say_it_too(gpt2: Path, tmp_path: Path) -> None:
    convert(gpt2, tmp_path / "ranks", to="torch", tp=2)
    assert any("not finite" in note for note in reshard(tmp_path / "ranks", tmp_path / "one").notes)
    done = export(tmp_path / "one", tmp_path / "hf")
    (note,) = [note for note in done.notes if "not finite" in note]
    assert "transformer.h.1.mlp.c_proj.weight: 1 NaN and 2 infinities; transformer.ln_f.bias: 2 NaN" in note
    for command in ("reshard", "export"):
        ended = run(command, str(tmp_path / "one"), str(tmp_path / "not"), "--strict")
        assert ended.code == 1
        assert ended.err.startswith("error: 2 tensors hold numbers that are not finite\n")
        assert not (tmp_path / "not").exists()


def test_finite_weights_are_no_matter(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    done = convert(hf_checkpoint("gpt2", fill="normal"), tmp_path / "dst", strict=True)
    assert not [note for note in done.notes if "finite" in note]


def test_a_cast_keeps_infinity_and_is_refused_where_it_would_make_one(gpt2: Path, tmp_path: Path) -> None:
    done = export(gpt2, tmp_path / "half", dtype="float16")
    assert any("1 NaN and 2 infinities" in note for note in done.notes)
    large = spoilt(gpt2, tmp_path / "large", {"transformer.ln_f.bias": {(0,): 1e30}})
    with pytest.raises(ConvertError, match="beyond the largest of float16"):
        export(large, tmp_path / "not", dtype="float16")


def test_strict_needs_the_checksums_pass(gpt2: Path, tmp_path: Path) -> None:
    assert not [note for note in convert(gpt2, tmp_path / "dst", checksums=False).notes if "finite" in note]
    ended = run("convert", str(gpt2), str(tmp_path / "not"), "--strict", "--no-checksums")
    assert ended.code == 1
    assert "--no-checksums" in ended.err


@pytest.mark.parametrize("dtype", sorted(LARGEST))
def test_counts_are_those_of_numpy(dtype: str) -> None:
    """Every number of 8 and 16 bits; of wider ones those around the borders, both signs, and random ones."""
    size = DTYPE_SIZES[dtype]
    if size <= 2:
        bits = np.arange(1 << 8 * size, dtype=f"u{size}")
    else:
        largest = LARGEST[dtype][0]
        edge = np.arange(largest - 100, largest + 100, dtype=f"u{size}")
        sign = np.array(1, f"u{size}") << np.array(8 * size - 1, f"u{size}")
        drawn = np.random.default_rng(0).integers(0, 1 << 8 * size - 1, 10_000, dtype=f"u{size}")
        bits = np.concatenate([edge, edge | sign, drawn, drawn | sign])
    if dtype == "float64":
        values = bits.view(np.float64)
    else:
        values = FP8[dtype][bits] if dtype in FP8 else as_float(bits, dtype)
    assert not_finite(bits, dtype) == (np.isnan(values).sum(), np.isinf(values).sum())
    finite = bits[np.isfinite(values)]
    assert not_finite(finite, dtype) == (0, 0)
    for place in np.flatnonzero(~np.isfinite(values))[:: max(1, len(bits) // 300)]:
        alone = np.append(finite[:50], bits[place])
        assert sum(not_finite(alone, dtype)) == 1
    assert dtype == "float64" or LARGEST[dtype][0] == FINITE[dtype]


def test_integers_have_none() -> None:
    assert not_finite(np.full(5, 0x7F80, np.uint16), "int16") == (0, 0)
