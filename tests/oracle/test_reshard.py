"""Resharding: there and back is the identity, two steps are one, and optimizer state goes along, for every pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mcore_convert import Verification, convert, inspect, reshard, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.spec import Layout, gpt
from mcore_convert.spec.names import MASTER, PARAM
from mcore_convert.storage.elements import Files, global_tensor
from mcore_convert.storage.values import as_float
from tests.conftest import HfMaker, real_checkpoint
from tests.tensors import assert_same_tensors, dcp_tensors, hf_tensors
from tests.wide import matrix

Options = dict[str, Any]

# Of models with four layers and four heads. In the order of this list each is also resharded to the next one.
LAYOUTS: dict[str, Options] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp4": {"pp": 4},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "first1": {"pp": 2, "first_stage_layers": 1},
    "tp4pp4": {"tp": 4, "pp": 4},
    "first1last1": {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    "tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2},
    "last3": {"tp": 2, "pp": 2, "last_stage_layers": 3},
    "text": {"pp": 2, "pipeline_layout": "Ett|t|t|L"},  # the last stage has no layer at all
}
NEXT = dict(zip(LAYOUTS, [*list(LAYOUTS)[1:], "one"], strict=True))
MODELS: dict[str, Options] = {
    "gpt2": {"config": {"vocab_size": 300}, "tokenizer": False},  # the padding depends on tp: 384 rows, or 512
    "llama-gqa": {},
}

Maker = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def made(hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """`made(model, format, layout)`: the checkpoint as `convert` writes it from Hugging Face, made once."""
    known: dict[tuple[str, str, str], Path] = {}

    def make(model: str, form: str, layout: str) -> Path:
        key = model, form, layout
        if key not in known:
            known[key] = tmp_path_factory.mktemp("made") / "there"
            convert(hf_checkpoint(model, **MODELS[model]), known[key], to=form, **LAYOUTS[layout])
        return known[key]

    return make


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a Megatron checkpoint but for random states, each rank's own ones, through torch."""
    if inspect(path).format == "torch_dist":
        (folder,) = (file.parent for file in path.rglob(".metadata"))
        return dcp_tensors(folder)
    result: dict[str, torch.Tensor] = {}
    for file in sorted(path.rglob("*.pt")):
        leaves = _leaves(torch.load(file, weights_only=False))
        result |= {f"{file.relative_to(path)}: {key}": tensor for key, tensor in leaves if "rng_state" not in key}
    return result


def _leaves(tree: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield at, torch.atleast_1d(tree)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{at}/{key}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{at}/{number}")


def assert_equal(a: Path, b: Path) -> None:
    """Byte-equal as files of ranks or chunks, read by torch, and as global tensors."""
    assert_same_tensors(tensors_of(a), tensors_of(b))
    assert verify(a, b).equal


@pytest.mark.parametrize(
    ("model", "layout"),
    matrix(
        ((model, layout) for model in MODELS for layout in LAYOUTS),
        thin=lambda model, layout: model == "llama-gqa" or layout in ("tp4", "tp2pp2vpp2", "text"),
    ),
)
def test_ranks_there_and_back_and_on(model: str, layout: str, made: Maker, tmp_path: Path) -> None:
    """`a -> b -> a` is the identity, and `a -> b -> c` is `a -> c`, which is what `convert` makes for `c`."""
    onward = NEXT[layout]
    for start in ("one", "tp2pp2vpp2"):
        a, there = made(model, "torch", start), tmp_path / start
        reshard(a, there, **LAYOUTS[layout])
        assert_same_tensors(tensors_of(there), tensors_of(made(model, "torch", layout)))
        reshard(there, tmp_path / f"{start}-back", **LAYOUTS[start])
        assert_equal(tmp_path / f"{start}-back", a)
    reshard(tmp_path / "one", tmp_path / "onward", **LAYOUTS[onward])
    assert_equal(tmp_path / "onward", made(model, "torch", onward))


@pytest.mark.parametrize(
    ("model", "layout"),
    matrix(
        ((model, layout) for model in MODELS for layout in ("one", "tp4", "tp2pp2vpp2", "last3", "text")),
        thin=lambda model, layout: layout == "tp4" or (model, layout) == ("llama-gqa", "tp2pp2vpp2"),
    ),
)
def test_between_the_formats(model: str, layout: str, made: Maker, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """`torch -> torch_dist -> torch` and the other way round, and back to Hugging Face."""
    ranks, dist = made(model, "torch", layout), made(model, "torch_dist", layout)
    same, two = LAYOUTS[layout], LAYOUTS["tp2"]
    reshard(ranks, tmp_path / "dist", to="torch_dist", **same)
    assert_equal(tmp_path / "dist", dist)
    reshard(tmp_path / "dist", tmp_path / "ranks", to="torch", **same)
    assert_equal(tmp_path / "ranks", ranks)
    reshard(dist, tmp_path / "two", **two)
    assert_equal(tmp_path / "two", made(model, "torch_dist", "tp2"))
    reshard(tmp_path / "two", tmp_path / "back", **same)
    assert_equal(tmp_path / "back", dist)
    hf = hf_checkpoint(model, **MODELS[model])
    convert(ranks, tmp_path / "hf")
    assert_same_tensors(hf_tensors(tmp_path / "hf"), hf_tensors(hf))
    assert verify(hf, tmp_path / "hf").equal


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_it_was_written(layout: str, made: Maker) -> None:
    """What is stored says the layout, and `inspect` draws what lies in the files."""
    wanted = Layout(**LAYOUTS[layout])
    actual = inspect(made("llama-gqa", "torch", layout))
    assert actual.layout is not None
    assert (actual.layout["tp"], actual.layout["pp"]) == (wanted.tp, wanted.pp)
    assert actual.layout.get("vpp") == (wanted.vpp if wanted.pp > 1 else None)
    assert sum(part.nbytes for part in actual.ranks) == actual.nbytes
    first = actual.as_dict()["ranks"][0]["rank"]
    assert first == {"tp": 0, "pp": 0, "ep": 0, "etp": None}
    assert {part.rank: part.layers for part in actual.ranks} == {
        rank: tuple(layers for stage, layers in wanted.stages(4).items() if stage.pp == rank.pp)
        for rank in wanted.ranks()
    }


def test_what_a_conversion_from_hugging_face_says(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Weights alone are a release; in an `iter_*` Megatron looks for optimizer state, and the user is told so."""
    hf = hf_checkpoint("llama-gqa")
    release = convert(hf, tmp_path / "release", to="torch", tp=2, pp=2)
    assert release.notes == ("the vocabulary of 421 is padded to 512 rows for tp = 2",)
    assert release.as_dict()["target"]["format"] == "torch"
    weights = [key for key in tensors_of(tmp_path / "release") if not key.endswith("_extra_state")]
    assert release.as_dict()["target"]["tensors"] == len(weights)
    assert (tmp_path / "release/latest_checkpointed_iteration.txt").read_text() == "release"
    iteration = convert(hf, tmp_path / "iteration", to="torch", pp=2, iteration=7)
    assert "Megatron-LM loads `iter_0000007` with --finetune, or with --no-load-optim --no-load-rng" in iteration.notes
    assert iteration.command is not None
    assert "--pipeline-model-parallel-size 2" in iteration.command


class Real(NamedTuple):
    """A real checkpoint: how it was saved, and what is said of its optimizer."""

    layout: Options
    optimizer: str


TE = "transformer_engine_names/"
TP2PP2: Options = {"tp": 2, "pp": 2}
REAL = {
    "gpt2_legacy_tp2pp2": Real(TP2PP2, "plain"),
    "llama_legacy_tp2pp2": Real(TP2PP2, "distributed"),
    "llama_legacy_vpp": Real({"pp": 2, "vpp": 2}, "plain"),
    "moe_legacy_pp2ep2": Real({"pp": 2, "ep": 2}, "plain"),
    "gpt2_tp2pp2": Real(TP2PP2, "distributed, fully_reshardable"),
    "llama_tp2pp2": Real(TP2PP2, "distributed, fully_reshardable"),
    "llama_tp2dp2": Real({"tp": 2}, "distributed, dp_reshardable"),
    "m19_llama_tp2pp2": Real(TP2PP2, "distributed, fully_reshardable"),
    f"{TE}v0.12.0_llama_te_torch": Real(TP2PP2, "distributed"),
    f"{TE}v0.12.0_llama_te_torch_dist": Real(TP2PP2, "distributed, fully_sharded_model_space"),
    f"{TE}v0.16.1_llama_te_torch": Real(TP2PP2, "distributed"),
    f"{TE}v0.16.1_llama_te_torch_dist": Real(TP2PP2, "distributed, dp_reshardable"),
    f"{TE}v0.16.1_moe_te_torch_dist": Real({"pp": 2, "ep": 2}, "distributed, dp_reshardable"),
}
DROPPED = ("only one has exp_avg, exp_avg_sq, master of an optimizer",)


def assert_with_optimizer(result: Verification, num_weights: int) -> None:
    """Assert that every weight was compared in its four states, and that all are bit-equal."""
    assert result.equal, result
    assert (result.num_weights, result.notes) == (4 * num_weights, ())


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints_go_anywhere_and_back(name: str, tmp_path: Path) -> None:
    source, real = real_checkpoint(name), REAL[name]
    about = inspect(source)
    assert about.optimizer == real.optimizer
    alone = reshard(source, tmp_path / "alone", optimizer=False)
    assert "optimizer state is left behind, as --no-optimizer says" in alone.notes
    weights = verify(source, tmp_path / "alone")
    assert (weights.equal, weights.notes) == (True, DROPPED)
    assert inspect(tmp_path / "alone").optimizer is None
    other = {"pp": 2, "ep": 2} if "moe" in name else {"tp": 4, "pp": 4} if "gpt2" in name else TP2PP2
    targets: dict[str, tuple[str, Options]] = {
        "one": ("torch", {}),
        "dist": ("torch_dist", {}),
        "ranks": ("torch", other),
    }
    for target, (form, layout) in targets.items():
        there, back = tmp_path / target, tmp_path / f"{target}-back"
        done = reshard(source, there, to=form, **layout)
        assert any(note.startswith("random states of the ranks ") for note in done.notes)
        assert (there / "iter_0000010").is_dir()  # with optimizer state the iteration is kept
        assert (there / "latest_checkpointed_iteration.txt").read_text() == "10"
        assert_with_optimizer(verify(source, there), weights.num_weights)
        reshard(there, back, to=about.format, **real.layout)
        assert_with_optimizer(verify(source, back), weights.num_weights)
    onward = tmp_path / "onward"
    reshard(tmp_path / "one", onward, to="torch", **other)
    assert_with_optimizer(verify(source, onward), weights.num_weights)
    if (
        inspect(tmp_path / "one").padded_vocab_size == about.padded_vocab_size
    ):  # else rows of padding were cut on the way
        assert_same_tensors(tensors_of(onward), tensors_of(tmp_path / "ranks"))


@pytest.mark.parametrize("name", ["gpt2_legacy_tp2pp2", "llama_legacy_tp2pp2", "llama_legacy_vpp"])
def test_real_ranks_go_to_hugging_face_and_back(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    done = convert(source, tmp_path / "hf")
    assert [note for note in done.notes if "optimizer state is left behind" in note]
    assert verify(source, tmp_path / "hf").equal
    convert(tmp_path / "hf", tmp_path / "ranks", to="torch", implementation="local", **REAL[name].layout)
    weights = verify(source, tmp_path / "ranks")
    assert (weights.equal, weights.notes) == (True, DROPPED)


@pytest.mark.parametrize("version", ["v0.12.0", "v0.16.1"])
def test_one_run_saved_in_two_formats(version: str, tmp_path: Path) -> None:
    """Megatron saved the same model as `torch` and as `torch_dist`: a reshard of one is the other."""
    ranks = real_checkpoint(f"{TE}{version}_llama_te_torch")
    dist = real_checkpoint(f"{TE}{version}_llama_te_torch_dist")
    assert_with_optimizer(verify(ranks, dist), 27)
    reshard(dist, tmp_path / "ranks", to="torch", **TP2PP2)
    assert_with_optimizer(verify(tmp_path / "ranks", ranks), 27)
    reshard(ranks, tmp_path / "dist", to="torch_dist", tp=2)
    assert_with_optimizer(verify(tmp_path / "dist", dist), 27)


def test_one_run_done_twice_is_the_same_in_both_formats() -> None:
    """The same seed, data and optimizer, saved in another format: Megatron's runs repeat themselves bit for bit."""
    ranks, dist = real_checkpoint("llama_legacy_tp2pp2"), real_checkpoint("llama_tp2pp2")
    assert losses(ranks) == losses(dist)
    assert_with_optimizer(verify(ranks, dist), 27)


def test_what_agrees_between_two_optimizers() -> None:
    """GPT-2 trained twice from one seed on the same data, with the plain and with the distributed optimizer.

    What agrees: every argument but those that choose the optimizer and the format, hence names, shapes and
    configuration; the learning rates; and the losses of the first two iterations, in all digits that are printed. So
    both began at the same weights, and Adam's first step has the sign of the gradient and the size of the learning
    rate, whatever the last bits of the gradient are.

    What does not: from the third iteration on the losses part, by 2e-6 first and by 1.3e-4 at most. Runs with one
    optimizer repeat themselves (the test above), so it is the optimizer: the distributed one sums the gradient's norm,
    by which gradients are clipped, over other pieces, and sums of floats depend on their order. Ten steps of 3e-3
    later the fp32 weights differ by less than 5e-4. The bias of the keys alone differs by more, up to 1.7e-2: it adds
    the same to every score of a query, softmax takes that away, so its gradient is rounding noise, which Adam scales
    to full steps.
    """
    plain, distributed = real_checkpoint("gpt2_legacy_tp2pp2"), real_checkpoint("gpt2_tp2pp2")
    first, second = identify(plain), identify(distributed)
    mine, theirs = dict(first.checkpoint.common.args or {}), dict(second.checkpoint.common.args or {})
    differing = {key for key in {*mine, *theirs} if repr(mine.get(key)) != repr(theirs.get(key))}
    of_the_optimizer = {"use_distributed_optimizer", "dist_ckpt_optim_fully_reshardable"}
    assert differing == of_the_optimizer | {"ckpt_format", "use_dist_ckpt", "save"}
    assert first.dims == second.dims
    result = verify(plain, distributed)
    assert (result.num_weights, result.config_differences) == (4 * 52, ())

    gaps = [abs(a - b) for a, b in zip(losses(plain), losses(distributed), strict=True)]
    assert gaps[:2] == [0, 0]
    assert 0 < gaps[2] < 1e-5
    assert 5e-5 < max(gaps) < 2e-4

    for name, gap in gaps_of_masters(plain, distributed).items():
        if name.endswith("linear_qkv.bias"):
            q, k, v = np.moveaxis(gap.reshape(4, 3, 16), 1, 0)  # of each head
            assert k.max() > 5e-3
            assert max(q.max(), v.max()) < 5e-4
        else:
            assert gap.max() < 5e-4, name
    gradients = states_of(plain, "exp_avg")
    for layer in range(4):
        bias = gradients[f"decoder.layers.{layer}.self_attention.linear_qkv.bias (exp_avg)"]
        _, k, v = np.moveaxis(np.abs(bias).reshape(4, 3, 16), 1, 0)
        assert k.max() < 2e-8
        assert v.max() > 1e-4


def losses(path: Path) -> list[float]:
    """Return the training losses that Megatron printed."""
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", (path / "losses.txt").read_text())]


def gaps_of_masters(a: Path, b: Path) -> dict[str, Any]:
    first, second = states_of(a, MASTER), states_of(b, MASTER)
    return {name.removesuffix(" (master)"): np.abs(first[name] - second[name]) for name in first}


def states_of(path: Path, state: str) -> dict[str, Any]:
    """Return one state of every weight, as global tensors."""
    model = identify(path)
    family = gpt.family(model.args)
    sources = find_weights(family, model.dims, model.checkpoint, (PARAM, state))
    with Files() as files:
        return {
            str(item): as_float(global_tensor(files, slots, family.shape(item.weight, model.dims)), "float32")
            for item, slots in sources.slots.items()
            if item.state == state
        }
