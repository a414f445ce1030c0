"""`mcore-convert inspect`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_convert.cli.text import in_bytes, in_parameters, say, show, table
from mcore_convert.spec.layout import Rank

if TYPE_CHECKING:
    from mcore_convert.inspection import Inspection
    from mcore_convert.ranks import RankPart


def command(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory, in any format")],
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON")] = False,
) -> None:
    """Say what a directory is: format, family, sizes, layout, weights, optimizer state. Reads headers only.

    Example: mcore-convert inspect ./checkpoints
    """
    from mcore_convert.api import inspect

    found = inspect(path)
    if json:
        show(jsonlib.dumps(found.as_dict(), indent=2, default=str))
    else:
        report(found)


def grid(ranks: tuple[RankPart, ...]) -> list[str]:
    """A picture of a layout: a column for each pipeline stage, a row for each tensor- and expert-parallel rank."""
    if len(ranks) < 2:
        return []
    columns = sorted({part.rank.pp for part in ranks})
    cells = {part.rank: part for part in ranks}
    rows = [("", *(f"pp {pp}" for pp in columns))]
    for tp, ep in sorted({(part.rank.tp, part.rank.ep) for part in ranks}, key=lambda at: (at[1], at[0])):
        with_experts = any(part.experts is not None for part in ranks)
        name = f"tp {tp}" + (f" ep {ep}" if with_experts else "")
        rows.append((name, *(cell(cells[Rank(tp, pp, ep)]) for pp in columns)))
    tp = 1 + max(part.rank.tp for part in ranks)
    share = [f"each rank has 1/{tp} of every weight that tensor parallelism cuts, and all of the others"]
    return ["", *table(rows), *(share if tp > 1 else [])]


def cell(part: RankPart) -> str:
    """What one rank holds: `embedding, layers 0-1 | 4-5, 62 kB`."""
    spans = " | ".join(span(layers) for layers in part.layers if layers)
    words = [f"layers {spans}" if spans else "no layers"]
    if "embedding" in part.ends:
        words.insert(0, "embedding")
    if "output" in part.ends:
        words.append("output")
    if part.experts is not None:
        words.append(f"experts {span(part.experts)}")
    return f"{', '.join(words)}: {in_bytes(part.nbytes)}"


def span(indices: range) -> str:
    """`0-3`, or `2` where it is one."""
    return f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else str(indices[0])


def report(found: Inspection) -> None:
    """The facts, then the weights."""
    layout = " ".join(f"{name}={size}" for name, size in (found.layout or {}).items())
    vocab = str(found.vocab_size)
    if found.padded_vocab_size != found.vocab_size:
        vocab += f", padded to {found.padded_vocab_size}"
    facts = [
        ("path", found.path),
        ("format", found.format + (f" ({found.dialect} keys)" if found.dialect else "")),
        ("written by", found.written_by),
        ("family", found.family or "unknown"),
        ("iteration", found.iteration),
        ("layout", layout),
        ("parameters", in_parameters(found.num_parameters)),
        ("dtype", ", ".join(found.dtypes)),
        ("weights", f"{in_bytes(found.nbytes)} in {found.num_files} file{'s' * (found.num_files != 1)}"),
        ("embeddings", None if found.tied is None else "tied" if found.tied else "untied"),
        ("vocabulary", None if found.vocab_size is None else vocab),
        ("optimizer", f"{found.optimizer} ({found.optimizer_keys} keys)" if found.optimizer else "none"),
    ]
    for line in table([(name, str(value)) for name, value in facts if value not in (None, "")]):
        show(line)
    for line in grid(found.ranks):
        show(line)
    show()
    rows = [("weight", "shape", "dtype", "count", "bytes")]
    for weight in found.weights:
        shape = "x".join(map(str, weight.shape))
        rows.append((weight.name, shape, weight.dtype, str(weight.count), in_bytes(weight.nbytes)))
    for line in table(rows, right=(3, 4)):
        show(line)
    for note in found.notes:
        say(f"note: {note}")
    for line in found.refusals:
        say(f"note: {line}")
