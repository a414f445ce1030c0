"""`mcore-convert inspect`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from mcore_convert.cli import options
from mcore_convert.cli.parameters import Parameter, taking
from mcore_convert.cli.terminal import progress, say, show, show_items, table
from mcore_convert.cli.value_tables import bars, by_layer, with_headings
from mcore_convert.options import LayoutOptions, part_of
from mcore_convert.text.grouping import folded
from mcore_convert.text.quantities import in_bytes, in_digits, in_parameters, in_percent, in_range

if TYPE_CHECKING:
    from mcore_convert.inspection.describe import Inspection
    from mcore_convert.inspection.ranks import RankPart
    from mcore_convert.inspection.statistics import WeightStatistics
    from mcore_convert.storage.codecs import Quantised


@taking(
    LayoutOptions,
    tp=Parameter("tp", options.Planned),
    pp=Parameter("pp", options.Planned),
    ep=Parameter("ep", options.Planned),
)
def command(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory, in any format")],
    *,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats", help="Read every weight and report statistics of its values; implied by --html"
        ),
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Include statistics of optimizer state")] = False,
    ignore_key: options.IgnoreKey = None,
    json: options.Json = False,
    html: options.Html = None,
    quiet: options.Quiet = False,
    **layout: Unpack[LayoutOptions],
) -> None:
    """Describe a checkpoint: format, family, sizes, layout, weights, optimizer state. Reads headers only.

    With --stats it reads all weights and reports statistics of their values. Given the sizes of a layout, it shows what
    each rank would hold.

    Example: mcore-convert inspect ./checkpoints
    """
    from mcore_convert.api import inspect
    from mcore_convert.spec.layout import Layout

    if optimizer and not (stats or html):
        raise typer.BadParameter("it needs --stats", param_hint="--optimizer")
    sizes = {name: size for name, size in layout.items() if size is not None}
    planned = Layout(**part_of(LayoutOptions, sizes)) if sizes else None
    with progress(quiet=quiet) as update:
        result = inspect(
            path,
            stats=stats,
            optimizer=optimizer,
            planned=planned,
            ignore_keys=ignore_key or (),
            html=html,
            progress=update,
        )
    if json:
        show(jsonlib.dumps(result.as_dict(), indent=2, default=str))
    elif not quiet:
        report(result)
    if html is not None and not quiet:
        say(f"page written to {html}")


def grid(ranks: tuple[RankPart, ...], *, least: int = 2) -> list[str]:
    """Return a table of a layout: a column per pipeline stage, a row per tensor- and expert-parallel rank."""
    if len(ranks) < least:
        return []
    columns = sorted({part.rank.pp for part in ranks})
    cells = {part.rank: part for part in ranks}
    rows = [("", *(f"pp {pp}" for pp in columns))]
    tp = 1 + max(part.rank.tp for part in ranks)
    for part in sorted(ranks, key=lambda part: (part.rank.ep, part.rank.etp or 0, part.rank.tp)):
        if part.rank.pp == columns[0]:
            row = (cell(cells[part.rank._replace(pp=pp)]) for pp in columns)
            rows.append((_row_name(part, tp), *row))
    return ["", *table(rows), *_shares(tp, ranks[0].expert_part)]


def _row_name(part: RankPart, tp: int) -> str:
    """Return the rank of a row: `tp 0 ep 1`, with its part of each expert where experts are cut differently."""
    words = f"tp {part.rank.tp}"
    if part.expert_part is None:
        return words
    words += f" ep {part.rank.ep}"
    number, count = part.expert_part
    return words if count == tp else f"{words} etp {number}"


def _shares(tp: int, expert_part: tuple[int, int] | None) -> list[str]:
    """Return the share of a weight on each rank, if any weight is cut; experts may have another share."""
    etp = tp if expert_part is None else expert_part[1]
    cut = f"1/{tp} of every weight that tensor parallelism cuts"
    if tp == etp:
        return [f"each rank has {cut}, and all of the others"] if tp > 1 else []
    if tp == 1:
        return [f"each rank has 1/{etp} of every weight of its experts that is cut, and all of the others"]
    of_experts = "all of those of its experts" if etp == 1 else f"1/{etp} of those of its experts"
    return [f"each rank has {cut}, but {of_experts}, and all of the others"]


def cell(part: RankPart) -> str:
    """Return the content of one rank: `embedding, layers 0-1 | 4-5, 62 kB`."""
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
    """Return a range as `0-3`, or `2` for a single index."""
    return f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else str(indices[0])


def report(result: Inspection) -> None:
    """Show the facts, then the weights."""
    layout = " ".join(f"{name}={size}" for name, size in (result.layout or {}).items())
    vocab = str(result.vocab_size)
    if result.padded_vocab_size != result.vocab_size:
        vocab += f", padded to {result.padded_vocab_size}"
    facts = [
        ("path", result.path),
        ("format", result.format + (f" ({result.dialect} keys)" if result.dialect else "")),
        ("written by", result.written_by),
        ("family", result.family or "unknown"),
        ("iteration", result.iteration),
        ("layout", layout),
        ("parameters", in_parameters(result.num_parameters)),
        ("dtype", ", ".join(result.dtypes)),
        ("weights", f"{in_bytes(result.nbytes)} in {result.num_files} file{'s' * (result.num_files != 1)}"),
        ("quantised", quantised_words(result.quantised)),
        ("embeddings", None if result.tied is None else "tied" if result.tied else "untied"),
        ("vocabulary", None if result.vocab_size is None else vocab),
        ("optimizer", f"{result.optimizer} ({result.optimizer_keys} keys)" if result.optimizer else "none"),
    ]
    for line in table([(name, str(value)) for name, value in facts if value not in (None, "")]):
        show(line)
    for line in grid(result.ranks):
        show(line)
    if result.planned:
        show()
        show("planned")
        for line in grid(result.planned, least=1)[1:]:
            show(line)
    show()
    if result.statistics:
        report_statistics(result)
    else:
        report_weights(result)
    for note in result.notes:
        say(f"note: {note}")
    for line in result.refusals:
        say(f"note: {line}")


def quantised_words(quantised: Quantised | None) -> str | None:
    """Return the quantised weights, their form, and the dtype after decoding; None if nothing is quantised."""
    if quantised is None:
        return None
    sizes = f"{in_bytes(quantised.nbytes)} become {in_bytes(quantised.decoded)} of {quantised.dtype}"
    return f"{quantised} ({quantised.method}); decoded, {sizes}"


def report_weights(result: Inspection) -> None:
    """Show a line per weight, as stored."""
    rows = [("weight", "shape", "dtype", "count", "bytes")]
    for weight in result.weights:
        shape = "x".join(map(str, weight.shape))
        rows.append((weight.name, shape, weight.dtype, str(weight.count), in_bytes(weight.nbytes)))
    for line in table(rows, right=(3, 4)):
        show(line)


def report_statistics(result: Inspection) -> None:
    """Show a line of statistics per weight, then the outliers."""
    from mcore_convert.inspection.statistics import total_rms

    bad = any(weight.num_nan or weight.num_inf for weight in result.statistics)

    def line(members: list[WeightStatistics]) -> tuple[str, ...]:
        zeros, numel = sum(w.zeros for w in members), sum(w.numel for w in members)
        num_bad = sum(w.num_nan + w.num_inf for w in members)
        return (
            "x".join(map(str, members[0].shape)),
            in_range([w.rms for w in members]),
            in_digits(max(w.largest for w in members)),
            in_percent(zeros / numel if numel else 0.0),
            *([str(num_bad)] if bad else []),
            bars(by_layer(members, total_rms)),
        )

    head = ("weight", "shape", "rms", "largest", "zeros", *(["NaN, inf"] if bad else []), "rms by layer")
    for text in table([head, *with_headings(folded(result.statistics), line)], right=(3, 4, 5) if bad else (3, 4)):
        show(text)
    show()
    if not result.outliers:
        show("nothing stands out")
        return
    show("what stands out")
    show_items([outlier.text for outlier in result.outliers])
