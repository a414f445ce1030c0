"""Odd files and words of a configuration: each is answered in a line, in files that are inherited and selected, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_convert.errors import ConfigError
from train_entry import load_config


def write(folder: Path, **files: str) -> str:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(folder / "main.yaml")


@pytest.mark.parametrize(
    ("wide", "line"),
    [
        ("defaults: [[x]]\n", "`['x']` in `defaults` selects nothing ({}, line 1)"),
        ("defaults: ['']\n", "has no choice ``"),
        ("defaults: [{'': x}]\n", "`{{'': 'x'}}` in `defaults` selects nothing ({}, line 1)"),
        ("defaults: [nowhere]\n", "`model` has no choice `nowhere`; "),
        ("defaults: [wide]\n", "`{}` inherits itself"),
        ("# wide\nhiden_size: 3\n", "there is no `model.hiden_size`; did you mean `model.hidden_size`? ({}, line 2)"),
        (
            "# wide\nhidden_size: big\n",
            '`model.hidden_size` = "big" is not a whole number from 1, or null ({}, line 2)',
        ),
        ("hidden_size: ${model.width}\n", "`model.hidden_size` cannot be resolved: Interpolation key 'model.width'"),
        ("- a\n", "`{}` is not the configuration of a run"),
    ],
)
def test_a_choice_that_is_wrong(wide: str, line: str, tmp_path: Path) -> None:
    source = write(tmp_path, main="defaults: [tiny-llama, {override model: wide}]\n", model__wide=wide)
    with pytest.raises(ConfigError) as refused:
        load_config(source)
    assert line.format(tmp_path / "model" / "wide.yaml") in refused.value.message


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (
            "defaults: [tiny-gpt2, {parallel: tp2}]\n",
            "`parallel` is selected before: write `override parallel: ...` ({}, line 1)",
        ),
        ("defaults: [tiny-gpt2, {override ../model: tp2}]\n", "there is no group `../model`"),
        ("defaults: [{parallel: ../parallel/tp2}]\n", "`parallel` has no choice `../parallel/tp2`"),
        (
            "training: {flow: 3}\n",
            "`training.flow` = 3 is not text or {{class: module:Class, OPTION: VALUE}} ({}, line 1)",
        ),
        ("defaults: [inner]\n", "`{}` inherits itself"),
    ],
)
def test_a_run_that_is_wrong(main: str, line: str, tmp_path: Path) -> None:
    source = write(tmp_path, main=main, inner="defaults: [main]\n")
    with pytest.raises(ConfigError) as refused:
        load_config(source)
    assert line.format(source) in refused.value.message


def test_what_is_empty_changes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path, main="defaults: [tiny-gpt2, null, {parallel: null}, _self_]\ntraining:\nmodel: {}\n")
    with pytest.raises(ConfigError, match="`parallel` is selected before"):
        load_config(source)
    source = write(tmp_path, main="defaults: [tiny-gpt2, null, _self_]\ntraining:\nmodel: {}\n")
    assert load_config(source) == load_config("tiny-gpt2")


def test_a_choice_may_be_called_by_a_number(tmp_path: Path) -> None:
    source = write(tmp_path, main="defaults: [{model: 345}, _self_]\n", model__345="hidden_size: 345\n")
    assert load_config(source).model.hidden_size == 345
    assert load_config(write(tmp_path, main="{}\n"), ["model=345"]).model.hidden_size == 345


@pytest.mark.parametrize(
    ("words", "flow"),
    [
        (["training.flow.beta=1"], {"class": "", "beta": 1}),
        (["training.flow=null", "training.flow.beta=1"], {"class": "", "beta": 1}),
        (["training.flow=a:B", "training.flow.beta=1", "training.flow.beta=2"], {"class": "a:B", "beta": 2}),
        (["training.flow={class: 'a:B', beta: 1, gamma: 2}", "~training.flow.beta"], {"class": "a:B", "gamma": 2}),
        (["training.flow.beta=1", "~training.flow"], ""),
    ],
)
def test_options_of_a_flow(words: list[str], flow: object) -> None:
    assert load_config("tiny-gpt2", words).training.flow == flow


def test_a_problem_of_a_value_is_reported_once(tmp_path: Path) -> None:
    source = write(tmp_path, main="training: {flow: [1], seed: -1}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(source, ["~training.seed", "training.steps=0"])
    assert [item.partition(" = ")[0] for item in refused.value.items] == ["`training.steps`", "`training.flow`"]
