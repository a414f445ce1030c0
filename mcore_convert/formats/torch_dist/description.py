"""Traits of a `torch_dist` checkpoint: the versions that may have written it, the form of its optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_convert.formats.base import Common
from mcore_convert.spec import releases


def written_by(common: Common, path: Path) -> str:
    """Return the Megatron Core versions that may have written a checkpoint. No version is stored:
    they are inferred from its traits.
    """
    args, state = common.args or {}, common.state
    if "norm_epsilon" in args and "layernorm_epsilon" in args:
        return "mcore-convert"
    release = releases.of_run(args)
    of_arguments = ((release >= (0, 20), "0.20", "0.19"),) if release is not None and release >= (0, 19) else ()
    traits = (
        ("content_metadata" in state, "0.13", "0.12"),
        ("layernorm_epsilon" in args, "0.16", "0.15"),
        ("null_tokenizer_eod_id" in args, "0.18", "0.17"),
        (not (path / "common.pt").is_file(), "0.19", "0.18"),
        *of_arguments,
    )
    low = next((since for there, since, _ in reversed(traits) if there), "0.8")
    # Only traits that are missing after the last present one are an upper bound: stored arguments may be incomplete.
    after = traits[[since for _, since, _ in traits].index(low) + 1 :] if low != "0.8" else traits
    if after and after[0][2] == low:
        return f"Megatron Core {low}"
    return f"Megatron Core {low} to {after[0][2]}" if after else f"Megatron Core {low} or later"


def optimizer_form(common: Common, keys: list[str]) -> str | None:
    """Return the form of the optimizer's tensors; None if there are none."""
    if not keys:
        return None
    state = common.state
    stated = _dict(state, "content_metadata").get("distrib_optim_sharding_type")
    optimizer = _dict(state, "optimizer")
    for part in (optimizer, _dict(optimizer, 0)):
        stated = stated or part.get("param_state_sharding_type")
    if stated:
        return f"distributed, {stated}"
    if any(".state.fp32_param." in key for key in keys):
        return "plain, with fp32 master weights"
    if any("optimizer.distributed." in key for key in keys):
        return "distributed, in buckets"
    return "plain"


def _dict(state: Mapping[Any, Any], key: object) -> Mapping[Any, Any]:
    value = state.get(key)
    return value if isinstance(value, dict) else {}
