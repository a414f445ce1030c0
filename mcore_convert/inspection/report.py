"""The public functions that inspect values: `inspect` and `diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from mcore_convert.checkpoints.contents import Contents, contents_of, stored_contents
from mcore_convert.checkpoints.download import local_path
from mcore_convert.checkpoints.identify import Opened, in_one_family, open_any
from mcore_convert.comparison.distance import Comparison, compare_contents
from mcore_convert.errors import ConvertError, MappingError
from mcore_convert.inspection.describe import Inspection, inspection_of, planned_ranks
from mcore_convert.inspection.outliers import find_outliers
from mcore_convert.inspection.page.pages import comparison_page, inspection_page
from mcore_convert.inspection.page.render import check_place, write_page
from mcore_convert.inspection.statistics import measure
from mcore_convert.options import ModelOptions, PathLike, check_names
from mcore_convert.spec.layout import Layout
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Progress
from mcore_convert.storage.sending import source_at
from mcore_convert.storage.views import file_errors


@file_errors()
def inspect(
    path: PathLike,
    *,
    stats: bool | None = None,
    optimizer: bool = False,
    planned: Layout | None = None,
    ignore_keys: Sequence[str] = (),
    html: PathLike | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Describe a checkpoint and its content. Reads headers only, unless statistics are asked for.

    Args:
        stats: read every weight once and return the statistics of its values, and the outliers. If not given, a page
            has them wherever they can be computed.
        optimizer: include statistics of the optimizer's state.
        planned: a layout, to show what each of its ranks would hold.
        ignore_keys: as for `convert`.
        html: also write one self-contained page there.
        progress: called with the bytes read so far and their total.

    Raises:
        UnreadableCheckpoint: it is not a checkpoint, or it is damaged.
        ConvertError: its weights are unknown, so that they have no statistics.
        LayoutError: the model does not fit the planned layout.
    """
    if html is not None:
        check_place(Path(html))
    with phase(progress, "opening"):
        opened = open_any(source_at(path), ignore_keys=ignore_keys)
        result = inspection_of(opened)
        if planned is not None:
            result = replace(result, planned=planned_ranks(opened, planned))
    if stats or (stats is None and html is not None):
        try:
            contents, notes = _to_measure(opened, optimizer)
            weights = measure(contents, progress=progress)
            result = replace(result, statistics=weights, outliers=tuple(find_outliers(weights)))
        except ConvertError as error:
            if stats:
                raise
            notes = [f"no statistics: {error.message}"]
        result = replace(result, notes=(*result.notes, *notes))
    if html is not None:
        with phase(progress, "writing the page"):
            write_page(Path(html), inspection_page(result, opened, planned))
    return result


def _to_measure(opened: Opened, optimizer: bool) -> tuple[Contents, list[str]]:
    """Return the tensors to measure, with notes about them: a quantised model, for one, is measured as stored."""
    try:
        return contents_of(opened, optimizer=optimizer), []
    except MappingError as error:
        if not opened.checkpoint.whole_views:
            raise
        return stored_contents(opened.checkpoint), [f"tensors are taken as they are stored: {error.message}"]


@file_errors()
def diff(
    a: PathLike,
    b: PathLike,
    *,
    optimizer: bool = False,
    html: PathLike | None = None,
    progress: Progress | None = None,
    **options: Unpack[ModelOptions],
) -> Comparison:
    """Compute the distance of two checkpoints, in any two formats and layouts, weight by weight.

    Args:
        a, b: Hugging Face or Megatron directories, or Hub ids; b is the later version of a.
        optimizer: include the states of the optimizer, if both have them.
        html: also write one self-contained page there.
        progress: called with the bytes read so far and their total.
        options: facts that the checkpoints do not state, as listed in `mcore_convert.options.ModelOptions`.

    Raises:
        ConvertError: one of them cannot be read, or they are different models.
        TypeError: an option does not exist.
    """
    check_names("diff", ModelOptions, options)
    if html is not None:
        check_place(Path(html))
    paths = [local_path(str(path)) for path in (a, b)]
    with phase(progress, "opening"):
        first, second = (open_any(path, **options) for path in paths)
    if first.model is not None and second.model is not None:
        models = in_one_family(first.model, second.model)
        first, second = replace(first, model=models[0]), replace(second, model=models[1])
    result = compare_contents(*_to_compare(first, second, optimizer), progress=progress)
    if html is not None:
        with phase(progress, "writing the page"):
            write_page(Path(html), comparison_page(result))
    return result


def _to_compare(a: Opened, b: Opened, optimizer: bool) -> tuple[Contents, Contents]:
    """Return the tensors of both; those of Hugging Face as stored if one of them does not match its family."""
    try:
        return contents_of(a, optimizer=optimizer), contents_of(b, optimizer=optimizer)
    except MappingError:
        if not (a.checkpoint.whole_views and b.checkpoint.whole_views):
            raise
        return stored_contents(a.checkpoint), stored_contents(b.checkpoint)
