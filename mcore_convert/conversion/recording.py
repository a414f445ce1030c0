"""The record of a conversion, made during the copying: checksums, sources, NaN and infinities."""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.checkpoints.manifest import MANIFEST, UNCOVERED, manifest_lines, write_manifest
from mcore_convert.checkpoints.origin import source_facts
from mcore_convert.conversion.beside import together
from mcore_convert.conversion.plan import Copy, Plan
from mcore_convert.errors import counted
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.storage.collection import without_collection
from mcore_convert.storage.digests import Region, checksum_of_runs, gaps_between
from mcore_convert.storage.elements import Files
from mcore_convert.storage.marker import is_bookkeeping
from mcore_convert.storage.paths import files_in, moved, name_below
from mcore_convert.storage.sources import handle_of, open_file
from mcore_convert.storage.views import View

MAX_NAME = chr(0x10FFFF)  # sorts behind any name


class Stored(NamedTuple):
    """Box of a tensor where it is written. `again`: a replica of a box that is stored elsewhere, too."""

    name: str
    dtype: str
    shape: Shape
    box: Box
    view: View
    again: bool = False


def stored_tensors(plan: Plan) -> Iterator[Stored]:
    """Yield every tensor that a plan writes, by its own name if it is stored in one piece, else by its weight's."""
    if plan.target.whole_views:
        for name, view in plan.target.whole_views.items():
            yield Stored(name, view.dtype, view.shape, Box.whole(view.shape), view)
        return
    for move in plan.moves:
        weight, name = move.item.weight, str(move.item)
        shape = plan.dims.padded_shape(weight.shape, vocab=weight.vocab)
        for slots, again in ((move.slots, False), (move.replicas, True)):
            yield from (Stored(name, slot.view.dtype, shape, slot.box, slot.view, again) for slot in slots)


def _made_of(plan: Plan) -> dict[str, set[str]]:
    """Return the tensors of the source that each tensor is copied from, by the names of `stored_tensors`."""
    here, there = _Places(plan.target.whole_views), _Places(plan.source.whole_views)
    made_of: dict[str, set[str]] = defaultdict(set)
    for move in plan.moves:
        if not plan.target.whole_views:
            made_of[str(move.item)] = {*plan.sources.names[move.item]}
        else:
            for copy in move.copies:
                names = there.names_of(copy.source) if plan.source.whole_views else plan.sources.names[move.item]
                for name in here.names_of(copy.target):
                    made_of[name] |= {*names}
    return made_of


class _Places:
    """Names of tensors by their place in a file."""

    def __init__(self, views: Mapping[str, View]) -> None:
        self._names: dict[Path, list[tuple[int, str]]] = defaultdict(list)
        for name, view in views.items():
            if view.nbytes:
                self._names[view.path].append((view.offset, name))
        for names in self._names.values():
            names.sort()

    def names_of(self, view: View) -> set[str]:
        """Return the tensor that a view belongs to; of several at one place, the last by name.
        For a coded tensor, return all its stored tensors.
        """
        if view.coded is not None:
            return {*view.coded.names}
        names = self._names[view.path]
        return {names[bisect.bisect(names, (view.offset, MAX_NAME)) - 1][1]}


class Recording:
    """Regions of the files that a plan writes below `partial`, and the number of copies that each still waits for.

    Without `checksums` there are no regions, nothing is read or counted, and the kernel copies bytes.

    Args:
        mine: the files that this process fills, by their final names.
    """

    def __init__(self, plan: Plan, partial: Path, mine: Set[Path], *, checksums: bool = True) -> None:
        self._plan, self._partial, self.checksums = plan, partial, checksums
        self._regions: dict[Path, list[Region]] = defaultdict(list)
        self._starts: dict[Path, tuple[list[int], list[Region]]] = {}
        self._here: dict[Path, Path] = {}
        self._lock = threading.Lock()
        self._left = dict.fromkeys(map(self.here, sorted(mine)), 0)  # number of pending copies per file
        if checksums:
            self._lay_out()
        for copy in (copy for move in plan.moves for copy in move.copies if copy.target.path in mine):
            self._left[self.here(copy.target.path)] += 1
            for view in copy.target.stored:
                region = self._at(self.here(view.path), view.offset)
                if region is not None:
                    region.pending += 1
        self._noted: dict[Path, dict[str, Any]] = {}
        self._untouched = [path for path, copies in self._left.items() if not copies]

    @without_collection()
    def _lay_out(self) -> None:
        """Compute the regions of all files."""
        spans: dict[Path, list[tuple[int, int, str]]] = defaultdict(list)
        for stored in stored_tensors(self._plan):
            if stored.view.nbytes:
                spans[stored.view.path].append((stored.view.offset, stored.view.end, stored.dtype))
        for path in sorted(spans):
            here, regions = self.here(path), self._regions[self.here(path)]
            for start, end, dtype in sorted(spans[path]):
                if regions and start < regions[-1].end:  # tensors at one place, such as tied ones, or interleaved ones
                    regions[-1].end = max(regions[-1].end, end)
                    regions[-1].dtype = dtype if dtype == regions[-1].dtype else None
                else:
                    regions.append(Region(here, start, end, dtype))
        self._starts = {path: ([each.start for each in regions], regions) for path, regions in self._regions.items()}

    def here(self, path: Path) -> Path:
        """Return the path of a file of the destination while it is being written."""
        known = self._here.get(path)
        if known is None:
            known = self._here[path] = moved(path, self._plan.reservation.path, self._partial)
        return known

    def _at(self, path: Path, offset: int) -> Region | None:
        """Return the region that contains a byte of a file."""
        starts, regions = self._starts.get(path, ((), ()))
        number = bisect.bisect_right(starts, offset) - 1
        return regions[number] if number >= 0 and offset < regions[number].end else None

    def feed(self, path: Path, at: int, part: memoryview) -> None:
        """Add bytes that were written to the checksum of their region."""
        region = self._at(path, at)
        if region is not None:
            region.add(at, part)

    def in_order(self, copies: Sequence[Copy]) -> list[list[list[Copy]]]:
        """Return the copies of a weight in groups for `copy_together`: the groups that fill one region in one list,
        in the order of the region.

        One thread that runs such a list writes the region from its start to its end.
        """
        if len(copies) == 1:
            return [[[*copies]]]
        parts: dict[Region, list[list[Copy]]] = {}
        alone: list[list[list[Copy]]] = []
        for group in together(copies):
            views = (view for copy in group for view in copy.target.stored)
            places = ((self.here(view.path), view.offset) for view in views)
            touched = {region for place in places if (region := self._at(*place)) is not None}
            if not touched:
                alone.append([group])
                continue
            before = {id(parts[region]): parts[region] for region in touched if region in parts}
            merged = next(iter(before.values()), [])
            for other in [part for part in before.values() if part is not merged]:
                merged += other
                parts.update((region, merged) for region, part in parts.items() if part is other)
            merged.append(group)
            parts.update(dict.fromkeys(touched, merged))
        distinct = [*{id(part): part for part in parts.values()}.values()]
        for part in distinct:
            part.sort(key=lambda group: (group[0].target.stored[0].path, group[0].target.stored[0].offset))
        return [*alone, *distinct]

    def done(self, copies: Iterable[Copy], files: Files) -> list[Path]:
        """Note that copies, by their places below `partial`, are done; return the files that this completes."""
        copies = list(copies)
        full = []
        with self._lock:
            for copy in copies:
                for view in copy.target.stored:
                    region = self._at(view.path, view.offset)
                    if region is not None:
                        region.pending -= 1
                        if not region.pending:
                            full.append(region)
        for region in full:
            if not region.is_complete:
                region.finish(files.writing(region.path))
        complete = []
        with self._lock:  # second lock: a file is complete once all of its regions are finished
            for copy in copies:
                self._left[copy.target.path] -= 1
                if not self._left[copy.target.path]:
                    complete.append(copy.target.path)
        for path in complete:
            self._finish(path, files)
        return complete

    @property
    def filled(self) -> Set[Path]:
        """Files that this process fills, by their places below `partial`."""
        return self._left.keys()

    def untouched(self, files: Files) -> list[Path]:
        """Return the files of this process that no copy fills, such as those of padding alone; finish their regions."""
        for path in self._untouched:
            self._finish(path, files)
        return self._untouched

    def _finish(self, path: Path, files: Files) -> None:
        """Finish the regions of a file that no copy has filled, such as rows of padding alone."""
        for region in self._regions.get(path, ()):
            region.finish(files.writing(path))

    def facts_of(self, path: Path) -> list[list[Any]]:
        """Return the facts of the regions of a complete file, for `adopt`."""
        return [[each.start, each.end, each.nan, each.infinite, each.sums] for each in self._regions.get(path, ())]

    def adopt(self, path: Path, facts: Sequence[Sequence[Any]]) -> None:
        """Adopt the facts of a file that another process, or an earlier run, has completed."""
        regions = self._regions.get(path, [])
        if [(start, end) for start, end, *_ in facts] != [(region.start, region.end) for region in regions]:
            raise ValueError(f"`{path}` was written in other regions than those of this plan")
        for region, (_, _, nan, infinite, sums) in zip(regions, facts, strict=True):
            region.adopt(nan, infinite, sums)

    def not_finite(self) -> list[str]:
        """Return the tensors that have NaN or infinities, one line each with their counts."""
        counts: dict[str, list[int]] = {}
        if any(region.nan or region.infinite for region in chain.from_iterable(self._regions.values())):
            seen: set[Region] = set()
            for stored in stored_tensors(self._plan):
                region = self._at(self.here(stored.view.path), stored.view.offset) if stored.view.nbytes else None
                if region is None or stored.again or region in seen or not (region.nan or region.infinite):
                    continue
                seen.add(region)
                count = counts.setdefault(stored.name, [0, 0])
                count[0], count[1] = count[0] + region.nan, count[1] + region.infinite
        lines = []
        for name, (nan, infinite) in counts.items():
            words = [f"{nan:,} NaN"] * bool(nan) + [counted(infinite, "infinity", "infinities")] * bool(infinite)
            lines.append(f"{name}: {' and '.join(words)}")
        return lines

    @without_collection()
    def write_manifest(self) -> Path:
        """Write the manifest of the checkpoint's directory, once all other files are there; return its path."""
        plan = self._plan
        folder = self.here(plan.target.path)
        paths = sorted({*files_in(folder).values(), *self._noted})
        listed = {
            name: self._noted.get(path) or self._file(path)
            for name, path in ((str(path.relative_to(folder)), path) for path in paths if path.is_relative_to(folder))
            if name not in UNCOVERED and not is_bookkeeping(name)
        }
        facts = {
            "source": source_facts(plan.source, plan.source_files),
            "format": plan.target.format,
            "family": plan.family.name,
            "options": dict(plan.options),
        }
        for name, quantised in (("decoded", plan.source.quantised), ("quantised", plan.target.quantised)):
            if quantised is not None:
                facts[name] = {field: value for field, value in asdict(quantised).items() if value is not None}
        headers = {} if plan.target.whole_views else plan.target.tensors  # whole views have the tensors' names
        write_manifest(folder / MANIFEST, manifest_lines(facts, listed, headers, self._tensors(folder)))
        return folder / MANIFEST

    def note(self, path: Path) -> None:
        """Record the manifest's entry of a complete file that will be gone when the manifest is written."""
        self._noted[path] = self._file(path)

    def _file(self, path: Path) -> dict[str, Any]:
        """Return the size of a file, and the checksum of the bytes outside of its regions."""
        size = path.stat().st_size
        if not self.checksums:
            return {"size": size}
        with open_file(path) as file:
            gaps = gaps_between(((region.start, region.end) for region in self._regions.get(path, ())), size)
            return {"size": size, "rest": checksum_of_runs(handle_of(file), path, gaps)}

    def _tensors(self, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the entry of each tensor; parts of one name follow one another."""
        entry: dict[str, Any] = {}
        name = None
        made_of = _made_of(self._plan)
        for stored in stored_tensors(self._plan):
            if stored.name != name:
                if name is not None:
                    yield name, entry
                name = stored.name
                entry = {"dtype": stored.dtype, "shape": list(stored.shape), "from": sorted(made_of[name]), "parts": []}
            entry["parts"].append(self._part(stored, folder))
        if name is not None:
            yield name, entry

    def _part(self, stored: Stored, folder: Path) -> dict[str, Any]:
        path, view = self.here(stored.view.path), stored.view
        region = self._at(path, view.offset) if view.nbytes else None
        end = view.end if view.nbytes else view.offset
        bounds = [view.offset, end] if region is None else [region.start, region.end]
        part: dict[str, Any] = {"file": name_below(path, folder), "bytes": bounds}
        if stored.box != Box.whole(stored.shape):
            part |= {"at": list(stored.box.offsets), "shape": list(stored.box.sizes)}
        if region is not None:
            part["sums"] = region.sums
        return part
