"""The pages of docs/families, from the tables of the families and from what the tests do: `python -m docs.generate`.

A test compares the pages in the repository with what this makes of the tables today.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields as fields_of
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fixtures.families import BY_TP, FAMILY_OF, MATRIX, RANKS
from fixtures.refused import REFUSED
from mcore_convert.checkpoints.families import GROUP, families, unrepresented
from mcore_convert.cli.families import row
from mcore_convert.spec.config.mapping import NONSENSE, REQUIRED, ConfigMapping, Field, Refused, shown
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Weight
from mcore_convert.spec.pack import Same

FOLDER = Path(__file__).parent / "families"
NOTE = "<!-- made by `python -m docs.generate`; do not edit -->"
# sizes for which every condition of a row can be asked; only the flags among them matter
SIZES = Dims(4, 64, 160, 8, 4, 8, 421, 512, 128, tied=False, qkv_bias=False, linear_bias=False)


def pages() -> dict[str, str]:
    """Return the text of every page by the name of its file."""
    made = {f"{family.name}.md": page(family) for family in families().values()}
    return {"README.md": index(), **made}


def index() -> str:
    """Return the text of the page that lists all families, and the architectures that are refused."""
    rows = [
        (f"[{family.name}]({family.name}.md)", _code(family.architectures), described(family))
        for family in families().values()
    ]
    refused = [(f"`{name}`", reason) for name, reason in unrepresented().items()]
    return _text(
        "# Families",
        NOTE,
        "What `config.json` calls a model decides its family. A key or a value that Megatron Core cannot represent is "
        "refused by its name; [add-a-family.md](../add-a-family.md) adds a family.",
        *_table(("family", "`architectures`", "what it is"), rows),
        "## Refused architectures",
        *_table(("`architectures`", "why it is not converted"), refused),
    )


def page(family: Family) -> str:
    """Return the text of the page of one family."""
    return _text(
        f"# {family.name}",
        NOTE,
        described(family),
        *_table(("`model_type`", "`architectures`", ""), _models(family)),
        "## Weights",
        "In the order of the forward pass. The names on Megatron's side are those of `torch_dist` with the layer "
        "spelled out. How a weight is cut over tensor-parallel ranks is its first column; its shape is in the words of "
        "Megatron's arguments.",
        *_table(("cut", "Megatron Core", "shape", "Hugging Face", "stored as", "where"), _rows(family)),
        *_ignored(family),
        *_configuration(family.config),
        *_limits(family),
        *_tested(family),
    )


def described(family: Family) -> str:
    """Return the first line of the family's file."""
    (point,) = (point for point in entry_points(group=GROUP) if point.name == family.name)
    point.load()
    return (sys.modules[point.module].__doc__ or "").strip().split("\n\n")[0]


def _models(family: Family) -> Iterator[tuple[str, str, str]]:
    yield f"`{family.config.model_type}`", _code(family.config.architectures), "read and written"
    for each in family.config.dialects:
        yield f"`{each.model_type}`", _code(each.architectures), f"read; written as `{family.config.model_type}`"


def _rows(family: Family) -> Iterator[tuple[str, ...]]:
    for weight in family.weights:
        cut, mcore, shape, _ = row(weight)
        yield (
            cut,
            f"`{mcore}`" if weight.mcore else "no place",
            shape,
            _spellings(weight),
            _pack(weight),
            _where(weight),
        )


def _pack(weight: Weight) -> str:
    if weight.copy_of is not None:
        return f"a copy of `{weight.copy_of}`"
    if weight.mcore is None:
        return "zeros"
    pack = (
        "the same" if isinstance(weight.pack, Same) else f"`{weight.pack}`".replace("Same()", "").replace("pack=", "")
    )
    return f"{pack}, plus {weight.less:g}" if weight.less else pack


def _spellings(weight: Weight) -> str:
    """Return the names that are written, and those that are read as well."""
    return " or ".join(_code(spelling.hf) for spelling in weight.spellings)


def _where(weight: Weight) -> str:
    """Return the part of a layer that has the weight, and the flags of a model that decide whether it does."""
    flags = [field.name for field in fields_of(Dims) if field.type == "bool"]
    conditions = ["layers that predict further tokens"] if weight.predicts else []
    conditions += [f"layers with `{weight.part}`"] if weight.part else []
    for flag in flags:
        changes: list[dict[str, Any]] = [{flag: value} for value in (False, True)]
        without, having = (weight.when(replace(SIZES, **change)) for change in changes)
        if without != having:
            conditions.append(f"`{flag}`" if having else f"not `{flag}`")
    return " and ".join(conditions) or "always"


def _ignored(family: Family) -> Iterator[str]:
    if family.ignore:
        yield f"Tensors without a weight, which are read over: {_code(family.ignore)}."
    if family.optional_prefix:
        yield f"The prefix `{family.optional_prefix}` may be missing from the names."


def _configuration(mapping: ConfigMapping) -> Iterator[str]:
    """Yield the fields of the family, and what its dialects have otherwise."""
    yield "## Configuration"
    yield "A key with the default of its class in transformers in brackets, and the arguments that it becomes."
    tables = _fields(mapping)
    yield from _fields_shown(tables)
    for each in mapping.dialects:
        own = [
            [line for line in lines if line not in common] for lines, common in zip(_fields(each), tables, strict=True)
        ]
        yield f"### Where `model_type` is `{each.model_type}`"
        yield from _fields_shown(own)


Lines = list[tuple[str, str]]


def _fields(mapping: ConfigMapping) -> list[Lines]:
    """Return the fields, by what they say: both sides; keys of one value; keys without effect;
    arguments of one value.
    """
    both: Lines = []
    one: Lines = []
    without: Lines = []
    always: Lines = []
    for field in mapping.fields:
        keys = ", ".join(f"`{key}`{_default(value)}" for key, value in field.hf.items())
        if field.hf and field.megatron:
            both.append((keys, _code(field.megatron)))
        elif field.hf:
            written = _written(field)
            if any(value is not None for value in written.values()):
                one.append((keys, ", ".join(f"`{key}` = {shown(value)}" for key, value in written.items())))
            elif _refuses(field):
                one.append((keys, "see the limits"))
            else:
                without.append((keys, ""))
        else:
            always += _fixed(field)
    return [both, one, without, always]


def _fields_shown(tables: list[Lines]) -> Iterator[str]:
    both, one, without, always = tables
    if both:
        yield from _table(("`config.json`", "Megatron-LM"), both)
    if one:
        yield from _table(("key", "represented"), one)
    if without:
        yield f"Without effect on the model: {', '.join(keys for keys, _ in without)}."
    if always:
        yield from _table(("argument of every model of the family", ""), always)


def _default(value: Any) -> str:
    return " (required)" if value is REQUIRED else "" if value is None else f" ({shown(value)})"


def _written(field: Field) -> dict[str, Any]:
    try:
        return field.to_hf({})
    except (Refused, KeyError, *NONSENSE):
        return {}


def _refuses(field: Field) -> bool:
    try:
        field.to_megatron({})
    except (Refused, KeyError, *NONSENSE):
        return True
    return False


def _fixed(field: Field) -> Iterator[tuple[str, str]]:
    """Yield the arguments that a field without keys sets."""
    try:
        values = field.to_megatron({})
    except (Refused, KeyError, *NONSENSE):  # from another field's keys
        yield _code(field.megatron), "follows from the sizes"
        return
    yield from ((f"`{name}`", f"`{value!r}`") for name, value in values.items())


def _limits(family: Family) -> Iterator[str]:
    messages = [message for name, _, message in REFUSED if FAMILY_OF[name] == family.name]
    yield "## Limits"
    yield "A key that no field answers for is refused, and so is an argument that changes the function."
    if messages:
        yield "Refused by name, as the tests show one at a time:"
        yield "\n".join(f"- {message.rstrip(' =')}" for message in messages)


def _tested(family: Family) -> Iterator[str]:
    names = [name for name, each in FAMILY_OF.items() if each == family.name]
    links = ", ".join(f"[{name}](../../fixtures/configs/{name}.json)" for name in names)
    yield "## Tested"
    yield f"With the tiny models of {links}:"
    layouts: dict[str, list[str]] = {}
    for name, to, layout in (*((name, "torch_dist", {"tp": tp}) for name, tp in BY_TP), *MATRIX):
        if name in names:
            layouts.setdefault(to, []).append(" ".join(f"{key}{value}" for key, value in layout.items()))
    ranks = [f"tp{tp} pp{pp}" for name, tp, pp in RANKS if name in names]
    lines = [
        *(
            f"Hugging Face to `{to}` and back is byte-equal at {', '.join(sorted(set(each)))}."
            for to, each in layouts.items()
        ),
        "Logits of Megatron Core's `GPTModel` and of transformers differ by less than 2e-5 in fp32"
        + (f", also at {', '.join(ranks)}." if ranks else "."),
        "The configuration comes back from Megatron's arguments alone, and from the flags that are printed.",
    ]
    yield "\n".join(f"- {line}" for line in lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["\n".join(f"| {' | '.join(cells)} |" for cells in lines)]


def _text(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Write the pages, and remove those of families that are gone."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
