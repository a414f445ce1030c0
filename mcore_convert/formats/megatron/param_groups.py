"""Parameter groups of Megatron's optimizers: their identifiers, their parameters, and their numbers of steps.

From Megatron Core 0.16.1, `optimizer/__init__.py` (`_get_param_groups`, `get_standard_config_overrides`) and
`optimizer.py` (`param_group_identifier_keys`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT

Group = Mapping[str, Any]

WITHOUT = "leave the optimizer state behind with --no-optimizer"
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")


def identifiers_of(group: Group) -> list[Any]:
    """Return the values that identify a group."""
    return [group.get(name, group.get(f"pre_{name}")) for name in IDENTIFIERS]  # NeMo's names have a prefix


def is_undecayed(name: str, num_dims: int) -> bool:
    """Return whether a parameter has no weight decay: norms and biases."""
    return num_dims == 1 or name.endswith(".bias")


def kind_of(name: str, num_dims: int, args: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return the kind of a parameter, which determines its group; see `kinds_of`."""
    return is_undecayed(name, num_dims), bool(args.get("decoupled_lr")) and name in (EMBEDDING, OUTPUT)


def kinds_of(groups: Iterable[Group], args: Mapping[str, Any]) -> list[tuple[bool, bool]]:
    """Return for each group whether it has no weight decay, and whether it has a learning rate of its own."""
    apart = args.get("decoupled_lr")
    return [
        (group.get("wd_mult") == 0, bool(group.get("is_decoupled_lr") or (apart and group.get("max_lr") == apart)))
        for group in groups
    ]


def step_of(groups: Iterable[Group], path: Path, *, counted: bool = False) -> Any:
    """Return the number of steps of an optimizer's groups; None if no group needs it.

    Args:
        counted: the optimizer's state needs it, regardless of the groups.

    Raises:
        UnreadableCheckpoint: the number is missing, or differs between groups.
    """
    groups = tuple(groups)
    steps = {step for group in groups if isinstance(step := group.get("step"), int | float)}
    if len(steps) > 1 or (not steps and (not groups or counted or any(map(counts_steps, groups)))):
        raise UnreadableCheckpoint(
            f"the parameter groups of the optimizer in `{path}` "
            + (
                f"took {' and '.join(map(str, sorted(steps)))} steps"
                if steps
                else "do not say how many steps they took"
            ),
            hint=WITHOUT,
        )
    return steps.pop() if steps else None


def counts_steps(group: Group) -> bool:
    """Return whether the optimizer of a parameter group needs its number of steps: only Adam, which has an epsilon."""
    return "eps" in group
