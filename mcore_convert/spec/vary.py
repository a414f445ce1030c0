"""Families made from the tables of others, by replacing fields and rows, not by inheritance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mcore_convert.spec.config.mapping import Field
from mcore_convert.spec.family import Weight, copy_of
from mcore_convert.spec.gpt import EMBEDDING, MTP, OUTPUT, predicting
from mcore_convert.spec.layers import LINEAR
from mcore_convert.spec.shard import COLUMN, REPLICATED


def fields(base: Iterable[Field], *own: Field, **defaults: Any) -> tuple[Field, ...]:
    """Return the fields of another family with changes.

    A field that shares a key or an argument with one of `own` is dropped. `defaults` are the class defaults in
    transformers for keys of the remaining fields.

    Raises:
        ValueError: no remaining field has the key of a default.
    """
    keys = {name for field in own for name in (*field.hf, *field.megatron)}
    kept = [field for field in base if not keys.intersection((*field.hf, *field.megatron))]
    unknown = set(defaults).difference(*(field.hf for field in kept))
    if unknown:
        raise ValueError(f"no field that is kept has {', '.join(sorted(unknown))}")
    changed = [replace(field, hf={key: defaults.get(key, value) for key, value in field.hf.items()}) for field in kept]
    return (*changed, *own)


def weights(base: Iterable[Weight], *own: Weight, without: Iterable[str] = (), after: str = "") -> tuple[Weight, ...]:
    """Return the rows of another family with changes.

    A row of `own` replaces the row of the same name; new rows follow the row `after`. Rows `without` are dropped.

    Raises:
        ValueError: a name is not among the rows.
    """
    rows = list(base)
    exchanged = {row.name: row for row in own}
    unknown = {*without, *([after] if after else [])}.difference(row.name for row in rows)
    if unknown:
        raise ValueError(f"no row is called {', '.join(sorted(unknown))}")
    new = [row for row in own if row.name not in {each.name for each in rows}]
    if new and not after:
        raise ValueError(f"where does {new[0].name} stand? Say after which row")
    result: list[Weight] = []
    for row in rows:
        if row.name not in without:
            result.append(exchanged.get(row.name, row))
        if row.name == after:
            result += new
    return tuple(result)


def with_biases(base: Iterable[Weight], *parts: str) -> tuple[Weight, ...]:
    """Return the rows, with a bias after each row whose name contains one of these `parts`.

    A bias is named after its weight on both sides, and is packed and sharded as the rows of the weight; if those are
    not sharded, it is replicated.
    """
    result: list[Weight] = []
    for row in base:
        result.append(row)
        if row.mcore is not None and any(part in row.mcore for part in parts):
            shard = row.shard if row.shard.dim == 0 else REPLICATED
            hf = tuple(_bias_of(name) for name in row.hf)
            result.append(replace(row, mcore=_bias_of(row.mcore), shape=row.shape[:1], hf=hf, shard=shard))
    return tuple(result)


def of_part(part: str, rows: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return the rows assigned to one part of a layer, in the words of `spec.layers`."""
    return tuple(replace(row, part=part) for row in rows)


def with_predicting(base: Iterable[Weight], layer: str) -> tuple[Weight, ...]:
    """Return the rows with those of layers that predict further tokens, inserted before the output layer.

    Such a layer has all weights of a decoder layer, and Hugging Face numbers it after those. It also has two more
    norms, a projection, a final norm, and copies of the embedding and of the output layer.

    Args:
        layer: prefix of the names of a layer in Hugging Face's files.
    """
    rows = list(base)
    own = {row.mcore: row for row in rows}
    hidden = ("hidden",)
    return (
        *(row for row in rows if row.mcore != OUTPUT),
        *(Weight(f"{MTP}{norm}.weight", hidden, (f"{layer}{norm}.weight",)) for norm in ("enorm", "hnorm")),
        Weight(f"{MTP}eh_proj.weight", ("hidden", "twice_hidden"), (f"{layer}eh_proj.weight",), COLUMN),
        *(predicting(row) for row in rows if row.per_layer),
        Weight(f"{MTP}final_layernorm.weight", hidden, (f"{layer}shared_head.norm.weight",)),
        own[OUTPUT],
        copy_of(own[EMBEDDING], f"{layer}embed_tokens.weight"),
        copy_of(own[OUTPUT], f"{layer}shared_head.head.weight"),
    )


def with_predicted_token(base: Iterable[Weight], layer: str) -> tuple[Weight, ...]:
    """Return the rows with those of one layer that predicts a further token, inserted before the output layer.

    Hugging Face calls it `mtp`: it has all weights of a layer with plain attention, two more norms, a projection and a
    final norm.

    Args:
        layer: prefix of the names of a decoder layer in Hugging Face's files.
    """
    rows = list(base)
    hidden = ("hidden",)
    outer = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    return (
        *(row for row in rows if row.mcore != OUTPUT),
        *(Weight(f"{MTP}{ours}.weight", hidden, (f"mtp.{theirs}.weight",)) for ours, theirs in outer.items()),
        Weight(f"{MTP}eh_proj.weight", ("hidden", "twice_hidden"), ("mtp.fc.weight",), COLUMN),
        *(
            _renamed(predicting(row), layer, "mtp.layers.{mtp}.")
            for row in rows
            if row.per_layer and row.part != LINEAR
        ),
        Weight(f"{MTP}final_layernorm.weight", hidden, ("mtp.norm.weight",)),
        *(row for row in rows if row.mcore == OUTPUT),
    )


def _renamed(row: Weight, old: str, new: str) -> Weight:
    """Return the row with other names in Hugging Face's files."""
    also = tuple(replace(each, hf=tuple(name.replace(old, new) for name in each.hf)) for each in row.also)
    return replace(row, hf=tuple(name.replace(old, new) for name in row.hf), also=also)


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
