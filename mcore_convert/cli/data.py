"""`mcore-convert data`: training data."""

from __future__ import annotations

import contextlib
import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_convert.cli import options
from mcore_convert.cli.command import Command, Group
from mcore_convert.cli.parameters import taking
from mcore_convert.cli.terminal import in_bytes, show, table

if TYPE_CHECKING:
    from train_entry.data.prepare import Prepared, Progress

app = typer.Typer(
    help="Make training data.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Kind(StrEnum):
    """Kinds of input files."""

    jsonl = "jsonl"
    text = "text"
    parquet = "parquet"


class Document(StrEnum):
    """Units of plain text that count as a document if there are no separators."""

    line = "line"
    file = "file"


@app.callback()
def group() -> None:
    """Make training data."""


@app.command("prepare", cls=Command)
@taking()
def prepare_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Files (JSON lines, text or Parquet; also .gz and .zst), datasets:NAME[:SPLIT], or a saved data set"
        ),
    ],
    prefix: Annotated[str, typer.Argument(help="Prefix of the output files: PREFIX_text_document.bin and .idx")],
    tokenizer: Annotated[str, typer.Option(help="Directory or Hub id of a Hugging Face tokenizer")],
    json_keys: Annotated[
        list[str] | None,
        typer.Option("--json-keys", "--column", help="Field or column with the text; repeatable [default: text]"),
    ] = None,
    separator: Annotated[
        str, typer.Option(help=r"Separator between documents of plain text, as '<|endoftext|>' or '\n\n'")
    ] = "",
    document: Annotated[Document, typer.Option(help="Without a separator: what counts as a document")] = Document.line,
    kind: Annotated[
        Kind | None, typer.Option("--format", help="Format of the files; detected from their names unless given")
    ] = None,
    append_eod: Annotated[bool, typer.Option(help="End each document with the tokenizer's end of text")] = True,
    special_tokens: Annotated[
        bool, typer.Option(help="Begin a document as the tokenizer begins a text, with a BOS where it has one")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes that tokenize; one for each core")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the tokenizer's Hub id")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=options.TARGET, help="Replace data that exist")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Tokenize texts into the .bin and .idx that Megatron trains on.

    Example: mcore-convert data prepare stories.jsonl stories --tokenizer gpt2
    """
    from train_entry.data.prepare import prepare
    from train_entry.data.sources import Reading

    with _progress(quiet=quiet) as update:
        done = prepare(
            inputs,
            prefix,
            tokenizer=tokenizer,
            reading=Reading(
                keys=_keys(json_keys),
                kind=kind.value if kind else None,
                separator=_unescaped(separator),
                document=document.value,
            ),
            workers=workers,
            append_eod=append_eod,
            special_tokens=special_tokens,
            revision=revision,
            overwrite=overwrite,
            progress=update,
        )
    if json:
        show(jsonlib.dumps(done.as_dict(), indent=2))
    elif not quiet:
        _report(done)


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """Return the keys of `--json-keys text,title` as well as `--json-keys text --json-keys title`, each once."""
    keys = [key.strip() for text in given or ["text"] for key in text.split(",")]
    if not all(keys):
        raise typer.BadParameter("a key has no name", param_hint="--json-keys")
    return tuple(dict.fromkeys(keys))


def _unescaped(text: str) -> str:
    r"""Return the text with line ends and tabs in place of `\n`, `\r` and `\t`."""
    return text.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")


def _report(done: Prepared) -> None:
    for prefix, pair in done.pairs.items():
        eod = f"each document ends with {pair.eod}" if pair.append_eod else "no end of document"
        empty = f"{pair.empty:,} empty, left out" if pair.empty else ""
        rate = f"{in_bytes(pair.text_bytes / max(done.seconds, 1e-9))}/s"
        rows = [
            ("documents", f"{pair.documents:,}", empty),
            ("text", in_bytes(pair.text_bytes), rate),
            ("tokens", f"{pair.tokens:,}", f"{pair.dtype}, {eod}"),
            ("tokenizer", f"{pair.vocab_size:,}", pair.tokenizer),
        ]
        for line in table(rows, right=(1,)):
            show(line)
        show(f"written to {prefix}.bin and .idx")


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Scope of a bar of bytes read, with documents and tokens, on stderr; None if stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1000, leave=False, file=sys.stderr) as bar:

        def update(at: Progress) -> None:
            bar.total = at.total or None
            bar.set_postfix_str(f"{at.documents:,} documents, {at.tokens:,} tokens", refresh=False)
            bar.update(at.read - bar.n)

        yield update
