"""Planning a conversion or a reshard between any two formats and layouts."""

from __future__ import annotations

import logging
from dataclasses import replace

from mcore_convert.checkpoints.identify import Model
from mcore_convert.checkpoints.weights import find_masters, find_weights
from mcore_convert.conversion.plan import Plan, moves_between
from mcore_convert.conversion.target import Target, lay_out_hf, lay_out_megatron
from mcore_convert.formats.base import Side
from mcore_convert.formats.registry import target_named
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments, hybrid, latent, rope
from mcore_convert.spec.names import PARAM
from mcore_convert.storage.collection import without_collection
from mcore_convert.storage.disk import stamped
from mcore_convert.text.quantities import in_bytes

logger = logging.getLogger(__name__)

REMAINDERS_NOTE = (
    "master weights, kept as 16-bit remainders of the weights, are written whole, in fp32: load them with "
    "`store_param_remainders` off"
)


@without_collection()
def plan_conversion(model: Model, target: Target) -> Plan:
    """Plan a conversion completely; nothing is written.

    Raises:
        ConvertError: the source is incomplete, a weight has no place, the configuration cannot be represented, or the
            layout does not fit.
    """
    written = target_named(target.format)
    source = model.checkpoint
    notes = list(model.notes)
    source.check_whole()
    notes += source.remarks()
    with_family = Side.HUGGING_FACE in (source.side, written.side)
    plan = (_plan_with_family if with_family else _plan_between_megatrons)(model, target, notes)
    copies = sum(len(move.copies) for move in plan.moves)
    num_files = len(plan.reservation.sizes)
    logger.info("planned %d copies of %s into %d files", copies, in_bytes(plan.nbytes), num_files)
    return replace(plan, stamps=stamped(plan.source_files), options=target.asked)


def _plan_with_family(model: Model, target: Target, notes: list[str]) -> Plan:
    """Plan a conversion to or from Hugging Face: weights only, by the rows of the family."""
    if model.refusal is not None:
        raise model.refusal
    source = model.checkpoint
    notes += [*latent.remarks(model.args), *rope.remarks(model.args), *hybrid.remarks(model.args)]
    if target.from_master:
        notes.append("weights are the optimizer's fp32 master copies; the rest of its state is left behind")
    elif source.optimizer_keys:
        notes.append(f"optimizer state is left behind ({len(source.optimizer_keys)} keys)")
    find = find_masters if target.from_master else find_weights
    sources = find(model.family, model.dims, source, allow_drift=target.allow_drift)
    if target_named(target.format).side is Side.HUGGING_FACE:
        if model.choice is not None and model.choice.note is not None:
            notes.append(model.choice.note)
        dims = model.dims
        checkpoint, reservation = lay_out_hf(model, target, sources, notes)
    else:
        padded = arguments.padded_vocab_size(model.dims.vocab_size, target.layout.tp)
        dims = replace(model.dims, padded_vocab_size=padded)
        checkpoint, reservation = lay_out_megatron(model, model.family, dims, target, sources, notes)
    moves = moves_between(model.family, dims, sources, checkpoint)
    return Plan(model.family, dims, source, checkpoint, reservation, moves, sources, tuple(notes), model.num_parameters)


def _plan_between_megatrons(model: Model, target: Target, notes: list[str]) -> Plan:
    """Plan a conversion of weights and optimizer state, by the rows of any GPT model; no family is involved.

    The rows of the padded vocabulary that both layouts have are kept, so that a round trip is the identity.
    """
    source = model.checkpoint
    family = gpt.family(model.args)
    divisible_by = model.args.get("make_vocab_size_divisible_by") or 128
    padded = arguments.padded_vocab_size(model.dims.vocab_size, target.layout.tp, divisible_by)
    rows = min(padded, model.dims.padded_vocab_size)
    held = replace(model.dims, vocab_size=rows)
    dims = replace(held, padded_vocab_size=padded)
    keeps = target_named(target.format).holds_optimizer
    states = source.states if target.optimizer and keeps else (PARAM,)
    if len(states) > 1 and target.iteration is None and source.training is not None:
        target = replace(target, iteration=source.training.iteration)
    if not target.optimizer and source.training is not None:
        notes.append("optimizer state is left behind, as --no-optimizer says")
    elif not keeps and source.training is not None:
        notes.append(f"optimizer state is left behind: the format `{target.format}` has no place for it")
    sources = find_weights(family, held, source, states, allow_drift=target.allow_drift)
    if any(slot.view.high is not None for slots in sources.slots.values() for slot in slots):
        notes.append(REMAINDERS_NOTE)
    for near in dict.fromkeys(check.near for check in sources.checks if check.near is not None):
        notes.append(
            f"with {near.kind} master weights do not round to their weights: they are proven to be within "
            f"{near.relative:.1%} of each and {near.of_largest:.1%} of the largest"
        )
    checkpoint, reservation = lay_out_megatron(model, family, dims, target, sources, notes)
    if checkpoint.weights_are_masters:
        sources = sources.in_masters(source)
    moves = moves_between(family, dims, sources, checkpoint)
    return Plan(family, dims, source, checkpoint, reservation, moves, sources, tuple(notes), model.num_parameters)
