"""The interface of a checkpoint, open or reserved: the places of each weight's boxes, and its other properties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mcore_convert.errors import LayoutError
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.traits import LayerSpec, Storage
from mcore_convert.spec.config.recorded import Recorded
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.gpt import EMBEDDING
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import PARAM
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.codecs import Quantised
from mcore_convert.storage.rounding import Tolerance
from mcore_convert.storage.views import Slot, Sum, TensorMeta, View


class Side(Enum):
    """The side whose names and configuration a format uses.

    On Hugging Face's side, tensors have the names of their family, and `config.json` is the configuration. On
    Megatron's, they have the names of Megatron Core, the same for all families, and a run's arguments are the
    configuration.
    """

    HUGGING_FACE = "Hugging Face"
    MEGATRON = "Megatron"


@dataclass
class Findings:
    """Result of looking up the weights of a family in a checkpoint: used keys, and problems."""

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the findings of one weight."""
        self.used |= other.used
        self.missing += other.missing
        self.misshapen += other.misshapen

    def expect(self, key: str, meta: TensorMeta | None, shape: Shape, *, rows_at_least: bool = False) -> bool:
        """Mark `key` as used, and return whether it exists with the shape that the configuration demands.

        `rows_at_least`: more rows are accepted, for a padded vocabulary.
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
    """State that a run needs to resume, in addition to its tensors.

    `groups` are the optimizer's parameter groups without their lists of parameters, those of chained optimizers
    concatenated; each has its identifiers (`wd_mult`, `lr_mult`, `is_expert_parallel`, `is_decoupled_lr`) and, if it
    counts them, its number of steps as `step`. `steps_by_group`: the optimizer counts steps per group, as Apex and
    Transformer Engine do, and not per parameter, as torch does. `distributed`: it is Megatron's distributed optimizer,
    not a plain one. `rest` holds other stored values (`num_floating_point_operations_so_far` and the like). `chain`
    has the number of each group's optimizer.
    """

    iteration: int
    distributed: bool
    groups: tuple[Mapping[str, Any], ...]
    steps_by_group: bool = False
    scheduler: Mapping[str, Any] | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)
    chain: tuple[int, ...] = ()

    @property
    def is_chained_by_kind(self) -> bool:
        """Whether optimizers of different kinds are chained, such as Muon and Adam."""
        return len({is_by_momentum(group) for group in self.groups}) > 1

    def chained_by_kind(self, *, apart: bool) -> list[list[Mapping[str, Any]]]:
        """Return the groups of each optimizer if different kinds are chained, such as Muon and Adam; otherwise nothing.

        If all are of one kind, the layout determines the groups of experts and the chain.

        Args:
            apart: whether experts are distributed over ranks in the run that will load the state.

        Raises:
            LayoutError: the run that saved the state differs in this.
        """
        if not self.is_chained_by_kind:
            return []
        if apart != any(group.get("is_expert_parallel") for group in self.groups):
            raise LayoutError(
                "the chain of optimizers of different kinds is that of another expert parallelism",
                hint="keep `--ep` at 1, or above, as it was; --no-optimizer leaves the state behind",
            )
        return [
            [group for each, group in zip(self.chain, self.groups, strict=True) if each == number]
            for number in sorted(set(self.chain))
        ]


def is_by_momentum(group: Mapping[str, Any]) -> bool:
    """Return whether a parameter group belongs to SGD or Muon, which keep one momentum and have no betas."""
    return "betas" not in group


@dataclass(frozen=True)
class Common:
    """Content of a checkpoint other than tensors: the run's arguments, its iteration, and the rest unchanged.

    `recorded` is the configuration of another program, if that replaces arguments.
    """

    args: Mapping[str, Any] | None = None
    iteration: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    recorded: Recorded | None = None


@dataclass(frozen=True)
class Checkpoint(ABC):
    """A checkpoint in some format, open for reading or reserved for writing.

    A format has to implement the abstract methods. The others have the defaults of a checkpoint with weights only.
    """

    path: Path

    @property
    @abstractmethod
    def format(self) -> str:
        """Name of the format."""

    @property
    @abstractmethod
    def side(self) -> Side:
        """Side whose names and configuration the checkpoint uses."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorMeta]:
        """All tensors that a family must have a place for, by key."""

    @property
    def headers(self) -> Mapping[str, TensorMeta]:
        """All tensors as stored in files: codes and scales in place of a decoded tensor."""
        return self.tensors

    @property
    def quantised(self) -> Quantised | None:
        """Description of the tensors that are decoded while they are read; None if there are none."""
        return None

    @property
    def undecoded(self) -> tuple[str, ...]:
        """Reasons why quantised tensors cannot be decoded, one line each; empty if they can, or if there are none."""
        return ()

    @abstractmethod
    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one global tensor. Missing and misshapen tensors are noted in `findings`.

        Vocabulary rows include the stored padding.
        """

    @abstractmethod
    def storage(self) -> Storage:
        """Describe how the checkpoint is stored."""

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        """Yield further copies of the boxes from `locate`, which must be equal, and the place of each."""
        return ()

    def check_whole(self) -> None:  # noqa: B027 - opening may already have proven it
        """Check with the headers that every file exists and is complete.

        Raises:
            UnreadableCheckpoint: a part of a tensor is missing.
        """

    def named_for(self, family: Family) -> Checkpoint:
        """Return the checkpoint with its keys interpreted as this family's names."""
        return self

    @property
    def original_config(self) -> Mapping[str, Any] | None:
        """`config.json` of the checkpoint; None on Megatron's side."""
        return None

    @property
    def common(self) -> Common:
        """Content other than tensors; empty on Hugging Face's side."""
        return Common()

    def described_by(self, args: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint with arguments from the model's configuration, used if none are stored."""
        return self

    def progress_files(self, path: Path, name: str) -> Iterable[tuple[Path, Path]]:
        """Yield the files with a run's progress, as pairs of target and source.

        Args:
            path: the run's directory that is written.
            name: name of the directory of its only iteration.
        """
        return ()

    @property
    def companions(self) -> Path | None:
        """Folder with a Hugging Face model's other files: tokenizer, generation config, license."""
        return None

    @property
    def whole_views(self) -> Mapping[str, View]:
        """Stored tensors that are contiguous under their own names, including those that no family knows."""
        return {}

    @property
    def coded_views(self) -> Mapping[str, View]:
        """Tensors that are decoded while they are read, by their decoded names."""
        return {}

    @property
    def embedding_rows(self) -> int | None:
        """Number of rows of the word embedding, including padding; None if there is no tensor of that name."""
        embedding = self.tensors.get(EMBEDDING)
        return None if embedding is None or not embedding.shape else embedding.shape[0]

    @property
    def saved_layout(self) -> Layout | None:
        """Layout for which the files were written; None if the files do not have one."""
        return None

    @property
    def layer_spec(self) -> LayerSpec | None:
        """Layer spec of the modules that give the names; None if names do not depend on it."""
        return None

    def remarks(self) -> list[str]:
        """Return remarks for the user about a complete checkpoint, one line each."""
        return []

    @property
    def sums(self) -> Iterable[Sum]:
        """Checksums of tensors that the writer has stored."""
        return ()

    @property
    def norm_state(self) -> bool:
        """Whether the run that saved it had Transformer Engine's norm as the model's final norm.

        A run has it if Transformer Engine is installed, with any layer spec. In Megatron-LM up to 0.13, loading rank
        files fails both if the norm's state is missing and if it is unexpected.
        """
        return False

    @property
    def states(self) -> tuple[str, ...]:
        """States that the checkpoint holds of every trained weight: `param`, and those of the optimizer."""
        return (PARAM,)

    def keeps(self, item: Item, dims: Dims) -> bool:
        """Return whether the checkpoint has this state of this weight: chained optimizers keep different states."""
        return True

    def tolerance(self, item: Item) -> Tolerance | None:
        """Return the tolerance for a master copy that does not round to its weight; None if it must."""
        return None

    @property
    def optimizer_keys(self) -> list[str]:
        """Names of the parts that hold optimizer state; empty if there are none."""
        return []

    @property
    def training(self) -> Training | None:
        """State that a run needs to resume; None without optimizer state."""
        return None

    @property
    def random_states(self) -> RandomStates | None:
        """Random states of all ranks; None if there are none, or if they cannot be transferred."""
        return None

    @property
    def weights_are_masters(self) -> bool:
        """Whether the stored weights are the fp32 master copies that the optimizer trains.

        A run in bf16 or fp16 computes with their rounded values.
        """
        return False

    @property
    def matched_by_order(self) -> bool:
        """Whether optimizer state is matched to weights by order and not by name, so that the data must be checked."""
        return False
