"""Random states go along where every rank stays what it was, and torch reads them as Megatron-LM's own."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_convert import Conversion, reshard
from mcore_convert.formats.files import dcp
from tests.conftest import real_checkpoint

TE = "transformer_engine_names/v0.16.1"
DROPPED = "random states of the ranks are not carried over: resume with --no-load-rng"


def iteration(root: Path) -> Path:
    return next(root.glob("iter_*"))


def states_of(root: Path) -> dict[tuple[int, ...], Any]:
    """Return what torch loads of every rank's random states, by pipeline and tensor rank."""
    folder = iteration(root)
    if (folder / ".metadata").is_file():
        result = {}
        for key, place in dcp.read(folder).objects.items():
            if key.startswith("rng_state/"):
                content = (folder / place.file).read_bytes()[place.offset : place.offset + place.length]
                (loaded,) = torch.load(io.BytesIO(content), weights_only=False, map_location="cpu")
                result[tuple(map(int, key.split("_")[2].split(".")))] = loaded
        return result
    result = {}
    for file in folder.glob("mp_rank_*/model_optim_rng.pt"):
        tp, *pp = map(int, file.parent.name.split("_")[2:])
        result[(*(pp[:1] or [0]), tp, *pp[1:])] = torch.load(file, weights_only=False, map_location="cpu").get(
            "rng_state"
        )
    return result


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool(np.asarray(a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def moved(name: str, target: Path, **options: Any) -> Conversion:
    return reshard(real_checkpoint(name), target, **options)


@pytest.mark.parametrize(
    ("name", "layout", "to"),
    [
        ("llama_tp2pp2", {"tp": 2, "pp": 2}, "torch_dist"),
        ("llama_tp2pp2", {"tp": 2, "pp": 2}, "torch"),
        ("m19_llama_tp2pp2", {"tp": 2, "pp": 2}, "torch"),
        ("llama_legacy_tp2pp2", {"tp": 2, "pp": 2}, "torch_dist"),
        ("llama_legacy_tp2pp2", {"tp": 2, "pp": 2}, "torch"),
        (f"{TE}_moe_te_torch_dist", {"pp": 2, "ep": 2, "etp": 1}, "torch_dist"),
        ("moe_legacy_pp2ep2", {"pp": 2, "ep": 2}, "torch"),
    ],
)
def test_they_go_along_where_the_ranks_stay(name: str, layout: dict[str, int], to: str, tmp_path: Path) -> None:
    done = moved(name, tmp_path / "same", to=to, **layout)
    actual, wanted = states_of(tmp_path / "same"), states_of(real_checkpoint(name))
    assert wanted
    assert actual.keys() == wanted.keys()
    assert all(equal(actual[place], states) for place, states in wanted.items())
    assert DROPPED not in done.notes
    assert any(note.startswith("random states of the ranks go along") for note in done.notes)
    assert "--no-load-rng" not in (tmp_path / "same/megatron_args.txt").read_text()
    generator = torch.Generator()
    generator.set_state(next(iter(actual.values()))[0]["torch_rng_state"])
    np.random.RandomState().set_state(next(iter(actual.values()))[0]["np_rng_state"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tp2pp2", {"tp": 1, "pp": 2}),
        ("llama_tp2pp2", {"tp": 2, "pp": 1}),
        ("llama_tp2pp2", {"tp": 2, "pp": 2, "iteration": 7}),
        (f"{TE}_moe_te_torch_dist", {"pp": 2, "ep": 1}),
        (f"{TE}_moe_te_torch_dist", {"pp": 2, "ep": 2, "etp": 1, "to": "torch"}),  # which tells ranks apart by others
    ],
)
def test_they_are_dropped_with_a_word_where_ranks_change(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    done = moved(name, tmp_path / "other", **options)
    assert DROPPED in done.notes
    assert not any(states_of(tmp_path / "other").values())
    assert "--no-load-rng" in (tmp_path / "other/megatron_args.txt").read_text()


def test_foreign_things_in_them_are_not_carried(tmp_path: Path) -> None:
    """A state may name a function of numpy that the reader does not call; a later reader of ours shall not either."""
    shutil.copytree(real_checkpoint("llama_legacy_tp2pp2"), tmp_path / "run")
    file = iteration(tmp_path / "run") / "mp_rank_00_000/model_optim_rng.pt"
    state = torch.load(file, weights_only=False, map_location="cpu")

    class Foreign:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.zeros, (3,)

    state["rng_state"][0]["np_rng_state"] = ("MT19937", Foreign(), 624, 0, 0.0)
    torch.save(state, file, pickle_module=pickle)
    done = reshard(tmp_path / "run", tmp_path / "same", tp=2, pp=2)
    assert DROPPED in done.notes
