"""Writing of checkpoints from `contents`: all ranks together, in the foreground or on a thread beside training.

Uses torch's own writer, with Megatron Core's plan: the writer of Megatron Core 0.16.1 forks processes and needs CUDA;
both write the same format. Training waits until it can no longer change the data to be written.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mcore_convert.errors import UnwritableTarget
from mcore_convert.formats.torch_dist.common_state import COMMON
from mcore_convert.formats.torch_dist.writer import METADATA_JSON
from train_entry.checkpoints import folder
from train_entry.checkpoints.ranks import Ranks
from train_entry.initialize import OtherRankError

THREADS = 2  # per rank, with a file each: 3.1 GiB/s into memory, where one thread writes 1.8


@dataclass(frozen=True)
class Prepared:
    """Checkpoint ready to be written: this rank's tensors and objects by key, and the small files."""

    tensors: Mapping[str, Any]
    files: Mapping[str, bytes]


class Writer:
    """Writer of checkpoints, one after the other. Every rank has one, and makes the same calls.

    No other object may use `ranks`: a thread may be writing.
    """

    def __init__(self, ranks: Ranks, keep_last: int | None) -> None:
        self.ranks = ranks
        self.keep_last = keep_last
        self._host: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._validated = False

    def write(self, content: dict[str, Any], files: Mapping[str, bytes], final: Path, *, asynchronous: bool) -> None:
        """Write a checkpoint, or begin to: if asynchronous, it is copied to host memory before this returns.

        Args:
            files: further files of its directory.

        Raises:
            UnwritableTarget: this checkpoint, or the one before that was in progress, cannot be written; on every rank.
        """
        self.finish()
        prepared = self._prepare(content, files, copied=asynchronous)
        if asynchronous:
            self._thread = threading.Thread(target=self._write_aside, args=(prepared, final), daemon=True)
            self._thread.start()
        else:
            self._write(prepared, final)

    def finish(self) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            UnwritableTarget: it cannot be written; on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _prepare(self, content: dict[str, Any], files: Mapping[str, bytes], *, copied: bool) -> Prepared:
        """Return Megatron Core's plan of the content: the part that each rank writes, no element twice."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
        from megatron.core.dist_checkpointing.strategies import torch as strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            distribute_main_replicas_with_precomputed_distribution,
        )
        from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

        sharded, common = save_preprocess(content, validate_access_integrity=False)
        # data-parallel ranks share the writing of their replicas
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        spread = determine_main_replica_uniform_distribution(sharded, group)
        distribute_main_replicas_with_precomputed_distribution(sharded, group, spread)
        if not self._validated:  # it communicates with all ranks, and the result does not change
            validate_sharding_integrity(determine_global_metadata(sharded)[1])
            self._validated = True
        by_key, _, _ = strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        if copied:
            by_key = {key: [self._on_host(each) for each in parts] for key, parts in by_key.items()}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        opened = io.BytesIO()
        torch.save(common, opened)
        small = {COMMON: opened.getvalue(), "metadata.json": json.dumps(METADATA_JSON).encode(), **files}
        return Prepared(strategy.mcore_to_pyt_state_dict(by_key, False), small)

    def _on_host(self, part: Any) -> Any:
        """Return a copy of a sharded tensor in host memory that is reused from one checkpoint to the next."""
        if not isinstance(part.data, Tensor):
            return part
        key = (part.key, part.global_offset)
        if key not in self._host:
            self._host[key] = torch.empty(part.data.shape, dtype=part.data.dtype, pin_memory=part.data.is_cuda)
        return replace(part, data=self._host[key].copy_(part.data.detach(), non_blocking=True))

    def _write_aside(self, prepared: Prepared, final: Path) -> None:
        try:
            self._write(prepared, final)
        except BaseException as error:  # raised by `finish`, in the thread that can handle it
            self._failure = error

    def _write(self, prepared: Prepared, final: Path) -> None:
        from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

        try:
            partial = self.ranks.first(lambda: folder.begin(final))
            dcp.save(
                dict(prepared.tensors),
                storage_writer=dcp.FileSystemWriter(partial, thread_count=THREADS),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self.ranks.group,
            )
            self.ranks.first(lambda: folder.complete(partial, prepared.files, self.keep_last))
        except (CheckpointException, OtherRankError, OSError, RuntimeError) as error:
            self.ranks.first(lambda: folder.discard(final))
            refusal = UnwritableTarget(
                f"the checkpoint `{final}` cannot be written: {reason_of(error)}",
                hint="the checkpoints before it are as they were",
            )
            raise self.ranks.once(refusal) from error


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with the rank where it occurred."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {reason_of(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
