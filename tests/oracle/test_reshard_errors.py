"""Bad checkpoints of ranks: `reshard` refuses each with what, where and what to do, and leaves nothing behind.

The messages are in `golden/reshard_refusals.txt` as the user sees them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.mp_rank import save_mp_rank
from fixtures.optimizer import random_state
from mcore_convert import reshard
from mcore_convert.checkpoints.manifest import MANIFEST
from tests.conftest import HfMaker
from tests.oracle.test_megatron_fixtures import ARGS, EXPERTS
from tests.ranks import run_ranks
from tests.refusals import golden_texts, run, tree

MODEL, BUFFERS = "model_optim_rng.pt", "distrib_optim.pt"
ITERATION = "iter_0000010"
LAST = f"{ITERATION}/mp_rank_01_001"
NORM = "decoder.final_layernorm.weight"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A Llama of four layers at TP2 x PP2 with either optimizer, and a model with experts."""
    folder = tmp_path_factory.mktemp("whole")
    args = {**ARGS, "num_layers": 4}
    models: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": (args, {"optimizer": "plain"}),
        "distributed": (args, {"optimizer": "distributed"}),
        "experts": ({**EXPERTS, "num_layers": 4}, {"optimizer": "plain"}),
    }
    result = {}
    for name, (held, options) in models.items():
        state = random_state(held)
        one, result[name] = folder / f"{name}-one", folder / name
        run_ranks(1, lambda: save_mp_rank(held, state, one, dtype=torch.bfloat16, **options))  # noqa: B023
        reshard(one, result[name], pp=2, tp=1 if name == "experts" else 2)
        (result[name] / ITERATION / MANIFEST).unlink()  # Megatron-LM writes none
    return result


def refused(source: Path, *options: str) -> str:
    """Return the message with which `reshard` refuses `SRC`; nothing may have changed.
    Paths are relative to its parent.
    """
    here = source.parent
    before = tree(here)
    ended = run("reshard", source, here / "DST", *options)
    assert (ended.code, ended.out) == (1, ""), ended
    assert tree(here) == before
    return ended.err.replace(f"{here}/", "")


def change(path: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage that rewrites one file with torch."""

    def rewrite(source: Path) -> None:
        content = torch.load(source / path, weights_only=False)
        edit(content)
        torch.save(content, source / path)

    return rewrite


def nudge(tensor: torch.Tensor) -> None:
    """Flip the sign of one element."""
    tensor.view(-1)[3].neg_()


def nudge_buffer(content: Any) -> None:
    (buffer,) = content[0].values()
    nudge(buffer["param"])


def truncate(source: Path) -> None:
    file = source / LAST / MODEL
    file.write_bytes(file.read_bytes()[:-2000])


@dataclass(frozen=True)
class Case:
    """How a source is damaged, and which options are asked for."""

    damage: Callable[[Path], Any] = field(default=lambda source: None)
    source: str = "plain"
    options: tuple[str, ...] = ()


CASES = {
    "a missing rank": Case(lambda source: shutil.rmtree(source / LAST)),
    "a missing rank file": Case(lambda source: (source / LAST / MODEL).unlink()),
    "a missing optimizer file": Case(lambda source: (source / LAST / BUFFERS).unlink(), "distributed"),
    "ranks of different iterations": Case(change(f"{LAST}/{MODEL}", lambda content: content.update(iteration=20))),
    "a rank too many": Case(lambda source: shutil.copytree(source / LAST, source / ITERATION / "mp_rank_02_001")),
    "pp2 that calls itself ep2": Case(
        lambda source: [
            (folder.rename(folder.with_name(folder.name + "_000"))) for folder in sorted((source / ITERATION).iterdir())
        ],
    ),
    "a plain master that does not round": Case(
        change(f"{LAST}/{MODEL}", lambda content: nudge(content["optimizer"]["fp32_from_fp16_params"][0][0]))
    ),
    "a master in a buffer that does not round": Case(change(f"{LAST}/{BUFFERS}", nudge_buffer), "distributed"),
    "moments of another shape": Case(
        change(
            f"{LAST}/{MODEL}",
            lambda content: content["optimizer"]["optimizer"]["state"][0].update(exp_avg=torch.ones(3)),
        ),
    ),
    "replicas that disagree": Case(change(f"{LAST}/{MODEL}", lambda content: nudge(content["model"][NORM]))),
    "a truncated file": Case(truncate),
    "a foreign class": Case(change(f"{LAST}/{MODEL}", lambda content: content.update(more=shutil.rmtree))),
    "layers that pp does not divide": Case(options=("--pp", "3")),
    "heads that tp does not divide": Case(options=("--tp", "3")),
    "experts that ep does not divide": Case(source="experts", options=("--ep", "3")),
    "experts that there are not": Case(options=("--ep", "2")),
    "virtual stages that do not fit": Case(options=("--pp", "2", "--vpp", "4")),
    "a pipeline layout of other stages": Case(options=("--pp", "2", "--pipeline-layout", "Ett|tt|L")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_checkpoint_is_refused(name: str, whole: Mapping[str, Path], tmp_path: Path) -> None:
    case = CASES[name]
    source = Path(shutil.copytree(whole[case.source], tmp_path / "SRC"))
    case.damage(source)
    assert refused(source, *case.options) == golden_texts("reshard_refusals.txt")[name]


@pytest.mark.parametrize("name", ["a plain master that does not round", "a missing optimizer file"])
def test_weights_alone_need_no_sound_optimizer(name: str, whole: Mapping[str, Path], tmp_path: Path) -> None:
    case = CASES[name]
    source = Path(shutil.copytree(whole[case.source], tmp_path / "SRC"))
    case.damage(source)
    assert run("reshard", source, tmp_path / "DST", "--no-optimizer").code == 0


def test_hugging_face_has_no_layout(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = Path(shutil.copytree(hf_checkpoint("llama-gqa", tokenizer=False), tmp_path / "SRC"))
    assert refused(source, "--tp", "2") == golden_texts("reshard_refusals.txt")["hugging face"]


def test_every_message_is_pinned() -> None:
    assert sorted(golden_texts("reshard_refusals.txt")) == sorted([*CASES, "hugging face"])
