"""Files of remote stores, read by ranges: neighbouring blocks in one request, several requests at once, with a cache.

Headers are read in small pages, so that little more than the headers is fetched; the bytes of tensors in large blocks,
with read-ahead for sequential readers. Both take a bounded amount of memory, however large the files are.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from mcore_convert.storage.asking import asked
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.remote import RemotePath
from mcore_convert.storage.threads import aside

REQUEST = 8 * 2**20  # bytes of a request, at most
CONNECTIONS = 16
AT_ONCE = 4 * REQUEST  # bytes that one reader waits for


class Cache:
    """Cache of blocks of files: already read, or being fetched.

    Args:
        block: bytes of each block.
        capacity: bytes that are kept; the least recently used are dropped first.
        ahead: most bytes of read-ahead for a sequential reader.
    """

    def __init__(self, block: int, capacity: int, ahead: int) -> None:
        self.block, self._most, self._ahead = block, capacity // block, ahead // block
        self._held: OrderedDict[tuple[Any, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, file: Ranges, into: memoryview, at: int) -> int:
        """Fill `into` with the bytes at an offset and return their number: fewer at the end of the file."""
        end = min(at + len(into), file.size)
        for start in range(at, end, AT_ONCE):
            stop = min(start + AT_ONCE, end)
            first = start // self.block
            wanted = self._wanted(file, first, (stop - 1) // self.block)
            for number, block in enumerate(aside(partial(_results, wanted)), first):
                low, content = number * self.block, memoryview(block)
                here, there = max(start, low), min(stop, low + len(content))
                into[here - at : there - at] = content[here - low : there - low]
        return max(0, end - at)

    def clear(self) -> None:
        """Release the memory."""
        with self._lock:
            self._held.clear()

    def expect(self, file: Ranges, numbers: Iterable[int]) -> None:
        """Start fetching blocks, at most as many as are kept."""
        with Deferral():  # otherwise a signal could leave a block that is awaited and never fetched
            with self._lock:
                work = self._begin(file, sorted(numbers)[: self._most])
            self._submit(file, work)

    def _wanted(self, file: Ranges, first: int, last: int) -> list[Future[bytes]]:
        """Return the blocks from `first` to `last`, and start fetching those that are missing, with some read-ahead."""
        wanted = range(first, last + 1)
        with Deferral():
            with self._lock:
                further = self._further(file, first)
                topped_up = (file.identity, last + further // 2 + 1) in self._held
                end = min(last + (0 if topped_up else further), (file.size - 1) // self.block)
                work = self._begin(file, range(first, end + 1))
                for number in wanted:
                    self._held.move_to_end((file.identity, number))
                futures = [self._held[file.identity, number] for number in wanted]
                while len(self._held) > self._most:
                    self._held.popitem(last=False)
            self._submit(file, work)
        return futures

    def _further(self, file: Ranges, first: int) -> int:
        """Return how many blocks to read ahead: as many as were read without a gap before `first`,
        up to the limit.
        """
        before = itertools.takewhile(lambda number: (file.identity, number) in self._held, range(first - 1, -1, -1))
        return sum(1 for _ in itertools.islice(before, self._ahead))

    def _begin(self, file: Ranges, numbers: Iterable[int]) -> list[tuple[list[int], list[Future[bytes]]]]:
        """Return the requests for the missing blocks, in order."""
        work: list[tuple[list[int], list[Future[bytes]]]] = []
        for number in numbers:
            if (file.identity, number) in self._held:
                continue
            future = self._held[file.identity, number] = Future()
            if work and work[-1][0][-1] == number - 1 and len(work[-1][0]) * self.block < REQUEST:
                work[-1][0].append(number)
                work[-1][1].append(future)
            else:
                work.append(([number], [future]))
        return work

    def _submit(self, file: Ranges, work: Iterable[tuple[list[int], list[Future[bytes]]]]) -> None:
        for run, futures in work:
            _pool().submit(self._fetch, file, run, futures)

    def _fetch(self, file: Ranges, run: Sequence[int], futures: Sequence[Future[bytes]]) -> None:
        """Read neighbouring blocks with one request."""
        start = run[0] * self.block
        stop = min((run[-1] + 1) * self.block, file.size)
        try:
            content = file.fetch(start, stop)
        except BaseException as error:
            with self._lock:
                for number in run:  # so that the next reader tries again
                    self._held.pop((file.identity, number), None)
            for future in futures:
                future.set_exception(error)
            return
        for number, future in enumerate(futures):
            future.set_result(content[number * self.block : (number + 1) * self.block])


PAGES = Cache(16 * 2**10, 64 * 2**20, ahead=REQUEST)
BLOCKS = Cache(2**20, 512 * 2**20, ahead=4 * REQUEST)


class Ranges(io.RawIOBase):
    """A file of a remote store, open for reading."""

    def __init__(self, path: RemotePath, pages: Cache) -> None:
        state = path.stat()
        self.path, self.size, self._cache, self._at = path, state.st_size, pages, 0
        self._fs, self._key = path.store.fs, path.key
        self.identity = (str(path), path.store.serial, state.st_size, state.st_mtime_ns, state.st_ino)

    def read_at(self, into: memoryview, at: int) -> int:
        """Fill `into` with the bytes at an offset, as `os.preadv` does, and return their number."""
        return self._cache.read_into(self, into.cast("B"), at) if at < self.size else 0

    def expect(self, places: Iterable[int]) -> None:
        """Start fetching the blocks at these offsets."""
        self._cache.expect(self, {at // self._cache.block for at in places if at < self.size})

    def fetch(self, start: int, stop: int) -> bytes:
        """Fetch a range from the store, complete.

        Raises:
            OSError: it cannot be read, or has become shorter.
        """

        def question() -> bytes:
            content = self._read(start, stop)
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content):,} of {stop - start:,} bytes came")
            return content

        return asked(self.path, question)

    def _read(self, start: int, stop: int) -> bytes:
        if getattr(self._fs, "async_impl", False):
            return bytes(self._fs.cat_file(self._key, start=start, end=stop))
        with self._fs.open(self._key, "rb", cache_type="none") as file:  # no buffer of its own
            file.seek(start)
            return bytes(file.read(stop - start))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        count = self.read_at(memoryview(into), self._at)
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def _results(futures: Iterable[Future[bytes]]) -> list[bytes]:
    return [future.result() for future in futures]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ranges")
