"""What every format offers: where the boxes of a weight lie, in a checkpoint that is read or one that is reserved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.shard import Shape
from mcore_convert.tensors import Slot, TensorMeta


@dataclass
class Findings:
    """What was seen while the weights of a family were looked up in a checkpoint."""

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def expect(self, key: str, meta: TensorMeta | None, shape: Shape, *, rows_at_least: bool = False) -> bool:
        """Note that `key` is used; whether it is there in the shape that the configuration demands.

        `rows_at_least`: more rows are welcome, as a padded vocabulary has.
        """
        self.used.add(key)
        if meta is None:
            self.missing.append(key)
            return False
        padded = rows_at_least and meta.shape[1:] == shape[1:] and meta.shape[:1] >= shape[:1]
        if meta.shape != shape and not padded:
            self.misshapen.append(f"{key} is {list(meta.shape)}, the configuration demands {list(shape)}")
            return False
        return True


@dataclass(frozen=True)
class Training:
    """What a run needs to go on beside its tensors.

    `groups` are the optimizer's parameter groups without their lists of parameters, those of chained optimizers one
    after the other; each says which it is (`wd_mult`, `lr_mult`, `is_expert_parallel`, `is_decoupled_lr`) and, under
    `step`, how many steps it took. `steps_by_group`: whether the optimizer counts them so, as those of Apex and
    Transformer Engine do, or for each parameter, as torch's own does. `distributed` tells Megatron's distributed
    optimizer from the plain ones, and `rest` holds what is stored beside them (`num_floating_point_operations_so_far`
    and the like).
    """

    iteration: int
    distributed: bool
    groups: tuple[Mapping[str, Any], ...]
    steps_by_group: bool = False
    scheduler: Mapping[str, Any] | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)


class Checkpoint(Protocol):
    """A checkpoint in some format, open for reading or reserved for writing."""

    @property
    def format(self) -> str:
        """The format's name."""

    @property
    def path(self) -> Path:
        """The directory."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """Every tensor that a family must have a place for, by its key in this format."""

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it holds of every trained weight: `param`, and what an optimizer kept."""

    @property
    def training(self) -> Training | None:
        """What a run needs to go on; None where no optimizer state is held."""

    @property
    def found_by_order(self) -> bool:
        """Whether optimizer state is found by its order and not by a name, so that it needs a proof in the data."""

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """The boxes of one global tensor. What is missing or misshapen is noted in `findings`.

        Vocabulary rows come as they are stored, padding included.
        """

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        """Further copies of boxes that `locate` gave, which must be equal, and where each is."""


@dataclass
class Reservation:
    """The files of a checkpoint before the first tensor byte: sizes, the bytes known already, and what comes last."""

    path: Path
    sizes: dict[Path, int] = field(default_factory=dict)
    literals: list[tuple[Path, int, bytes]] = field(default_factory=list)
    carried: dict[Path, Path] = field(default_factory=dict)  # target -> source, copied as they are
    texts: dict[Path, bytes] = field(default_factory=dict)  # written after the tensors, in this order

    @property
    def nbytes(self) -> int:
        """Bytes that the checkpoint will take on disk, the carried files left out."""
        return sum(self.sizes.values()) + sum(len(text) for text in self.texts.values())
