"""Options are defined once: Python and the type checker refuse a wrong name, and commands take what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from mcore_convert import convert, diff, export, export_all, iter_hf_weights, push, reshard, verify
from mcore_convert.cli import app
from mcore_convert.cli.parameters import PARAMETERS
from mcore_convert.options import ConvertOptions, ExportOptions, HubOptions, LayoutOptions, ModelOptions, names_of
from mcore_convert.spec.layout import Layout

NO_WORDS = {"progress", "bars"}  # options that are no words of a command line


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    """mypy reports each of these calls: without an error there, its comment would be one."""
    calls = [
        lambda: convert(tmp_path, tmp_path / "out", tpp=2),  # type: ignore[call-arg]
        lambda: reshard(tmp_path, tmp_path / "out", overwright=True),  # type: ignore[call-arg]
        lambda: export(tmp_path, dtyp="float32"),  # type: ignore[call-arg]
        lambda: verify(tmp_path, tmp_path, vocab=3),  # type: ignore[call-arg]
        lambda: diff(tmp_path, tmp_path, vocab=3),  # type: ignore[call-arg]
        lambda: push(tmp_path, "me/model", privat=True),  # type: ignore[call-arg]
        lambda: next(export_all(tmp_path, layout="x")),  # type: ignore[call-arg]
        lambda: iter_hf_weights(tmp_path, tp=2),  # type: ignore[call-arg]
    ]
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()


def test_the_layout_has_the_options_of_a_layout() -> None:
    of_stored_arguments = ("account_for_embedding", "account_for_loss")
    assert {*names_of(LayoutOptions), *of_stored_arguments} == {*vars(Layout())}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("convert", {*names_of(ConvertOptions)}),
        ("reshard", {*names_of(ConvertOptions)} - {"family", "hf_config", "tokenizer", "revision", "stream"}),
        ("export", {*names_of(ExportOptions)}),
        ("verify", {*names_of(ModelOptions)}),
        ("diff", {*names_of(ModelOptions)}),
        ("push", {*names_of(HubOptions), "ignore_keys", "dry_run"}),
        ("inspect", {*names_of(LayoutOptions), "ignore_keys"}),
    ],
)
def test_commands_take_the_options_of_their_functions(command: str, options: set[str]) -> None:
    params = {param.name for param in get_command(app).commands[command].params}  # type: ignore[attr-defined]
    assert {PARAMETERS[name].name for name in options - NO_WORDS} <= params
    others = {each.name for name, each in PARAMETERS.items() if name not in options}
    own = {"optimizer"}  # a switch of its own in `diff` and `inspect`
    assert not params & (others - {PARAMETERS[name].name for name in options - NO_WORDS} - own)
