"""`mcore-convert train`."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_convert.cli import completion, options
from mcore_convert.cli.interruption import Interrupted
from mcore_convert.cli.parameters import taking
from mcore_convert.cli.terminal import in_bytes, in_parameters, show, table

if TYPE_CHECKING:
    from train_entry.config.estimate import Estimate
    from train_entry.config.schema import Config


@taking()
def command(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            autocompletion=completion.ready_runs,
            help="YAML file, directory that a run left, or name of a ready run",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            autocompletion=completion.overrides,
            help="parallel=tp2 selects a choice, training.steps=20 sets a value",
        ),
    ] = None,
    export_hf: Annotated[
        bool,
        typer.Option("--export-hf", help="Write the model for transformers at the end [checkpoint.export_hf=end]"),
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the ready runs and the choices of each group")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration in full as YAML, and end")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and show sizes and memory; start nothing")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="With --dry-run: ranks of the run; the fewest that it needs unless given"
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            rich_help_panel=options.OUTPUT,
            help="Print as JSON what --list, --print-config or --dry-run show; a run writes metrics.jsonl",
        ),
    ] = False,
) -> None:
    """Train a model in this process.

    Over several ranks: torchrun --nproc-per-node 4 -m train_entry CONFIG ...

    Example: mcore-convert train tiny-gpt2 training.steps=20
    """
    if json and not (list_ or print_config or dry_run):
        raise typer.BadParameter(
            "it is for --list, --print-config and --dry-run; a run writes its numbers to metrics.jsonl",
            param_hint="--json",
        )
    from train_entry.extra import require_extra

    require_extra()
    if list_:
        show_choices(json=json)
        return
    if config is None:
        raise typer.BadParameter("a YAML file or the name of a ready run; `--list` shows them", param_hint="CONFIG")
    from train_entry.config.compose import as_yaml, load_config

    chosen = load_config(config, [*(["--export-hf"] if export_hf else ()), *(overrides or ())])
    if print_config:
        show(chosen.model_dump_json(indent=2) if json else as_yaml(chosen).rstrip())
    elif dry_run:
        report(chosen, planned(chosen, ranks), json=json)
    else:
        from train_entry.pretrain import pretrain

        try:
            pretrain(chosen)
        except Interrupted as stop:
            stop.remains = (
                f"the checkpoints in `{chosen.run_dir}` are whole, and the next start goes on from the newest"
            )
            raise


def show_choices(*, json: bool) -> None:
    """Show the ready runs, and the choices of each group, one per line or as JSON."""
    from train_entry.config.files import CONFIGS, ENDING, choices, ready_runs, title
    from train_entry.config.nearest import groups

    runs = {name: title(CONFIGS / f"{name}{ENDING}") for name in ready_runs()}
    chosen = {
        group: {name: title(CONFIGS / group / f"{name}{ENDING}") for name in choices(group)} for group in groups()
    }
    if json:
        show(jsonlib.dumps({"runs": runs, "groups": chosen}, indent=2))
        return
    rows: list[tuple[str, str]] = []
    for heading, titles in [("runs", runs), *((f"{group}=", titles) for group, titles in chosen.items())]:
        rows += [(heading, ""), *((f"  {name}", words) for name, words in titles.items())]
    for line in table(rows):
        show(line)


def planned(config: Config, ranks: int | None) -> Estimate:
    """Return the requirements of a run, after every check that is possible without starting it.

    Args:
        ranks: number of ranks; the fewest that the layout needs unless given.

    Raises:
        ConvertError: the run would be refused.
    """
    from mcore_convert.spec.config.arguments import normalise
    from train_entry.checked import checked
    from train_entry.config.estimate import estimate
    from train_entry.config.layouts import ranks_of

    world_size = ranks or ranks_of(config.parallel)
    run = checked(config, world_size, None)  # the run will probably be on the device of another machine
    return estimate(config, normalise(run.args), world_size)


def report(config: Config, plan: Estimate, *, json: bool) -> None:
    """Show the run in a few lines, or as JSON."""
    from train_entry.config.layouts import torchrun

    if json:
        show(jsonlib.dumps({**dataclasses.asdict(plan), "memory": plan.memory}, indent=2))
        return
    parallel, training = config.parallel, config.training
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "vpp": parallel.vpp, "cp": parallel.cp, "ep": parallel.ep}
    layout = [f"{name} {size}" for name, size in sizes.items() if size is not None and size > 1] + [f"dp {plan.dp}"]
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks: {torchrun(plan.world_size)}"
    parts = {
        "weights": plan.weights,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations,
    }
    each_step, in_all = in_parameters(plan.tokens_per_step), in_parameters(plan.tokens_per_step * training.steps)
    on_a_rank = in_parameters(plan.num_local_parameters)
    rows = [
        ("model", f"{in_parameters(plan.num_parameters)} parameters, {on_a_rank} on the fullest rank"),
        ("layout", f"{' x '.join(layout)}, {ranks}"),
        ("step", f"{training.global_batch_size} samples of {training.seq_length} tokens, {each_step} tokens in all"),
        ("", f"in {plan.num_microbatches} microbatches of {training.micro_batch_size} on each data-parallel rank"),
        ("run", f"{training.steps} steps, {in_all} tokens"),
        ("memory", f"about {in_bytes(plan.memory)} on a rank"),
        ("", ", ".join(f"{name} {in_bytes(nbytes)}" for name, nbytes in parts.items())),
        ("into", str(config.run_dir)),
    ]
    for line in table(rows):
        show(line)
    show("nothing was started (--dry-run)")
