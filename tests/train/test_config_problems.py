"""Problems of a configuration: all at once, each with its key, what is allowed and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_train_config import refusal, write
from train_entry.config.compose import load_config
from train_entry.config.nearest import MEGATRON, keys, nearest_key

# what is wrong


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("lr", "optimizer.lr"),
        ("training.lr", "optimizer.lr"),
        ("training.step", "training.steps"),
        ("trainer.steps", "training.steps"),
        ("training_steps", "training.steps"),
        ("tensor_model_parallel_size", "parallel.tp"),
        ("parallel.tensor-model-parallel-size", "parallel.tp"),
        ("data.path", "data.paths"),
        ("save", "run_dir"),
        ("chekpoint.save", "checkpoint.save"),
        ("bf16", "training.precision=bf16"),
        ("paralel", "parallel"),
        ("run-dir", "run_dir"),
        ("qwertyuiop", None),
    ],
)
def test_the_nearest_key(wrong: str, meant: str | None) -> None:
    assert nearest_key(wrong) == meant
    line = refusal("tiny-gpt2", [f"{wrong}=1"]).message
    assert line == f"there is no `{wrong}`" + (f"; did you mean `{meant}`?" if meant else "") + " (command line)"


def test_megatrons_names_lead_to_keys_that_exist() -> None:
    for argument, meant in MEGATRON.items():
        key, _, value = meant.partition("=")
        assert key in keys(), argument
        assert argument not in {name.rpartition(".")[2] for name in keys()} - {"save", "load"}, argument
        if value:
            load_config("tiny-gpt2", [meant])


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    source = write(
        tmp_path / "mine.yaml",
        "defaults:\n  - tiny-gpt3\n  - override paralel: tp2\n  - override model: gpt2-smal\n  - _self_\n"
        "training:\n  steps: ten\n  step: 3\n  precision: bf61\nschedul: {}\ndata: [a]\nparallel.tp: 2\n",
    )
    error = refusal(source, ["lr=3", "optimizer=adam", "parallel.pp=0", "training.seed=1,2", "--training.steps=3"])
    assert error.message == f"{len(error.items)} problems in the configuration `{source}`"
    expected = [
        "there is no `lr`; did you mean `optimizer.lr`? (command line)",
        "`optimizer` has no choice `adam`; did you mean `optimizer=adamw`? it has adamw, adamw-finetune, adamw-llama, "
        "sgd (command line)",
        "`training.seed` has several values where a run has one; a list is written `training.seed=[1,2]` "
        "(command line)",
        "`--training.steps=3` is written without dashes: `training.steps=...` (command line)",
        f"there is no run `tiny-gpt3` to inherit; did you mean `tiny-gpt2`? ({source}, line 2)",
        f"there is no group `paralel`; did you mean `parallel`? ({source}, line 3)",
        "`parallel.pp` = 0 is not a whole number from 1 (command line)",
        f'`training.steps` = "ten" is not a whole number from 1 ({source}, line 7)',
        f"there is no `training.step`; did you mean `training.steps`? ({source}, line 8)",
        f'`training.precision` = "bf61" is not one of fp32, bf16, fp16; did you mean `bf16`? ({source}, line 9)',
        f"there is no `schedul`; did you mean `schedule`? ({source}, line 10)",
        f'`data` = ["a"] is not a group of keys; a choice of it is selected under `defaults:`, or as `data=CHOICE` '
        f"({source}, line 11)",
        f"`parallel.tp` is written `parallel: {{tp: ...}}` in a file ({source}, line 12)",
    ]
    assert set(expected) <= set(error.items)
    (model,) = set(error.items) - set(expected)
    assert model.startswith(
        "`model` has no choice `gpt2-smal`; did you mean `model=gpt2-small`? it has checkpoint, gpt2-"
    )


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("training.steps=0", "`training.steps` = 0 is not a whole number from 1"),
        ("training.steps=null", "`training.steps` = null is not a whole number from 1"),
        ("training.steps=1.5", "`training.steps` = 1.5 is not a whole number from 1"),
        ("training.seed=-1", "`training.seed` = -1 is not a whole number from 0"),
        ("parallel.vpp=x", '`parallel.vpp` = "x" is not a whole number from 1, or null'),
        ("optimizer.lr=0", "`optimizer.lr` = 0 is not a number above 0"),
        ("optimizer.lr=inf", "`optimizer.lr` = Infinity is not a number above 0"),
        ("optimizer.beta2=1.0", "`optimizer.beta2` = 1.0 is not a number from 0 and below 1"),
        ("checkpoint.save=maybe", '`checkpoint.save` = "maybe" is not true or false'),
        ("data.paths=a", '`data.paths` = "a" is not a list of text: write [a, b]'),
        ("data.weights=[1,x]", '`data.weights[1]` = "x" is not a number above 0'),
        ("data.kind=moc", '`data.kind` = "moc" is not one of mock, indexed, sft; did you mean `mock`?'),
        ("run_dir=null", "`run_dir` = null is not a path"),
    ],
)
def test_a_bad_value_is_reported_with_what_is_allowed(override: str, allowed: str) -> None:
    assert refusal("tiny-gpt2", [override]).message == f"{allowed} (command line)"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.paths=[a,~/b]", "cannot be read; put texts with spaces"),
        ("training.steps", "`training.steps` is not KEY=VALUE"),
        ("schedule=wsd", "`schedule.wsd_decay_steps` has to be said"),
        ("training.seed=${training.sed}", "`training.seed` cannot be resolved: Interpolation key 'training.sed' not"),
        ("parallel@model=tp2", "places a group elsewhere"),
        ("hydra.run.dir=x", "there is no `hydra.run.dir`"),
    ],
)
def test_an_override_that_means_nothing(override: str, line: str) -> None:
    assert line in refusal("tiny-gpt2", [override]).message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("training:\n  steps: [3\nx: 4\n", "`{}`, line 3, column 2 is not YAML: expected ',' or ']', but got ':'"),
        ("training:\n  steps: 3\n  steps: 4\n", "`{}`, line 3, column 3 is not YAML: found duplicate key steps"),
        ("- training\n", "`{}` is not the configuration of a run"),
        ("defaults: tiny-gpt2\n", "`defaults` in `{}` is not a list"),
        ("defaults: [mine]\n", "`{}` inherits itself"),
        ("defaults: [[tiny-gpt2]]\n", "`['tiny-gpt2']` in `defaults` selects nothing ({}, line 1)"),
        (
            "defaults: [{override model: tiny-gpt2}]\n",
            "`{}` cannot be composed: In 'mine': Could not override 'model'.",
        ),
        ("defaults: [{model: broken}]\n", "broken.yaml`, line 2, column 1 is not YAML"),
        ("hydra: {job: {name: x}}\n", "there is no `hydra` ({}, line 1)"),
        ("parallel: tp2\n", '`parallel` = "tp2" is not a group of keys; a choice of it is selected under `defaults:`'),
        ("run_dir: ???\n", "`run_dir` has to be said ({}, line 1)"),
    ],
)
def test_a_file_that_is_no_run(tmp_path: Path, text: str, line: str) -> None:
    write(tmp_path / "model" / "broken.yaml", "a: [\n")
    source = write(tmp_path / "mine.yaml", text)
    assert line.format(source) in refusal(source).message


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    assert refusal("tiny-gtp2").message == "there is no ready run `tiny-gtp2`; did you mean `tiny-gpt2`?"
    assert refusal(str(tmp_path / "x.yaml")).message == f"there is no file `{tmp_path / 'x.yaml'}`"
    assert "must end in `.yaml`" in str(refusal(write(tmp_path / "mine.yml", "")))
    (tmp_path / "latin.yaml").write_bytes(b"run_dir: caf\xe9\n")
    assert "cannot be read" in refusal(str(tmp_path / "latin.yaml")).message
