"""The interface of a checkpoint: open or reserved, it says where the boxes of each weight lie, and all else of it."""

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
    """Whose names and configuration a format keeps.

    On Hugging Face's side tensors have a family's own names, and `config.json` is the configuration. On Megatron's they
    have the names of Megatron Core, which are the same for all families, and a run's arguments are the configuration.
    """

    HUGGING_FACE = "Hugging Face"
    MEGATRON = "Megatron"


@dataclass
class Findings:
    """What was seen while the weights of a family were looked up in a checkpoint."""

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add what was seen while one of the weights was looked up."""
        self.used |= other.used
        self.missing += other.missing
        self.misshapen += other.misshapen

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
    `step`, how many steps it took, where it counts them. `steps_by_group`: whether the optimizer counts them so, as
    those of Apex and Transformer Engine do, or for each parameter, as torch's own does. `distributed` tells Megatron's
    distributed optimizer from the plain ones, and `rest` holds what is stored beside them
    (`num_floating_point_operations_so_far` and the like). `chain` has the number of each group's optimizer.
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
        """Whether optimizers of different kinds are chained, as Muon and Adam."""
        return len({is_by_momentum(group) for group in self.groups}) > 1

    def chained_by_kind(self, *, apart: bool) -> list[list[Mapping[str, Any]]]:
        """Return the groups of each optimizer where different ones are chained, as Muon and Adam; else nothing.

        Where all are of one kind, which groups are of experts follows from the layout, and their chain with it.

        Args:
            apart: whether experts are spread over ranks in the run that will load the state.

        Raises:
            LayoutError: they are not in the run that saved it, or the other way round.
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
    """Return whether a parameter group is of SGD or Muon, which keep one momentum and have no betas."""
    return "betas" not in group


@dataclass(frozen=True)
class Common:
    """What a checkpoint stores beside tensors: the run's arguments, its iteration, and the rest as it stands.

    `recorded` is the configuration of another program, where that stands in the place of arguments.
    """

    args: Mapping[str, Any] | None = None
    iteration: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    recorded: Recorded | None = None


@dataclass(frozen=True)
class Checkpoint(ABC):
    """A checkpoint in some format, open for reading or reserved for writing.

    A format has to say what is abstract here. The rest are answers of a checkpoint that holds weights and nothing else.
    """

    path: Path

    @property
    @abstractmethod
    def format(self) -> str:
        """The format's name."""

    @property
    @abstractmethod
    def side(self) -> Side:
        """Whose names and configuration it keeps."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorMeta]:
        """Every tensor that a family must have a place for, by its key in this format."""

    @property
    def headers(self) -> Mapping[str, TensorMeta]:
        """Every tensor as its files hold it: of one that is decoded the codes and the scales."""
        return self.tensors

    @property
    def quantised(self) -> Quantised | None:
        """What is decoded as it is read; None where nothing is."""
        return None

    @property
    def undecoded(self) -> tuple[str, ...]:
        """Why what is quantised cannot be decoded, a line each; empty where it can, or where nothing is."""
        return ()

    @abstractmethod
    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """Return the boxes of one global tensor. What is missing or misshapen is noted in `findings`.

        Vocabulary rows come as they are stored, padding included.
        """

    @abstractmethod
    def storage(self) -> Storage:
        """Describe how it is stored."""

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        """Yield further copies of boxes that `locate` gave, which must be equal, and where each is."""
        return ()

    def check_whole(self) -> None:  # noqa: B027 - headers that were read may be all the proof that a format needs
        """Prove from headers that every file is there and complete.

        Raises:
            UnreadableCheckpoint: a part of a tensor is missing.
        """

    def named_for(self, family: Family) -> Checkpoint:
        """Return the checkpoint with its keys read as this family spells them."""
        return self

    @property
    def original_config(self) -> Mapping[str, Any] | None:
        """The `config.json` that is its configuration; None on Megatron's side."""
        return None

    @property
    def common(self) -> Common:
        """What is stored beside tensors; nothing on Hugging Face's side."""
        return Common()

    def described_by(self, args: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint with what the model's configuration says, for where no arguments are stored."""
        return self

    def progress_files(self, path: Path, name: str) -> Iterable[tuple[Path, Path]]:
        """Yield what says how far the run has come, as files of a run's directory: target and source.

        Args:
            path: of the run's directory that is written.
            name: of the directory of its one iteration.
        """
        return ()

    @property
    def companions(self) -> Path | None:
        """The folder with a Hugging Face model's other files: tokenizer, generation config, license."""
        return None

    @property
    def whole_views(self) -> Mapping[str, View]:
        """The tensors that lie in one piece under their own names as files hold them, whether a family knows them."""
        return {}

    @property
    def coded_views(self) -> Mapping[str, View]:
        """The tensors that are decoded as they are read, by the names that they have then."""
        return {}

    @property
    def embedding_rows(self) -> int | None:
        """Rows of the word embedding, padding included; None where no tensor has its name."""
        embedding = self.tensors.get(EMBEDDING)
        return None if embedding is None or not embedding.shape else embedding.shape[0]

    @property
    def saved_layout(self) -> Layout | None:
        """The layout that its files are cut for; None where the files do not say it."""
        return None

    @property
    def layer_spec(self) -> LayerSpec | None:
        """Whose modules the names are of; None where names are the same for all."""
        return None

    def remarks(self) -> list[str]:
        """Return what a user should know of a checkpoint that is whole, a line each."""
        return []

    @property
    def sums(self) -> Iterable[Sum]:
        """The checksums that its writer has stored of tensors."""
        return ()

    @property
    def norm_state(self) -> bool:
        """Whether the run that saved it had Transformer Engine's norm at the end of the model.

        It has one wherever Transformer Engine is installed, with any layer spec. Loading rank files fails in
        Megatron-LM up to 0.13 both where its state is absent and where it is one too many.
        """
        return False

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it holds of every trained weight: `param`, and what an optimizer kept."""
        return (PARAM,)

    def keeps(self, item: Item, dims: Dims) -> bool:
        """Return whether it is to hold this state of this weight: chained optimizers keep different ones."""
        return True

    def tolerance(self, item: Item) -> Tolerance | None:
        """Return how near a master copy is to a weight that it does not round to; None where it must."""
        return None

    @property
    def optimizer_keys(self) -> list[str]:
        """Where the optimizer's state is, a name each; empty where there is none."""
        return []

    @property
    def training(self) -> Training | None:
        """What a run needs to go on; None where no optimizer state is held."""
        return None

    @property
    def random_states(self) -> RandomStates | None:
        """The random states of all ranks; None where there are none, or where they cannot be carried."""
        return None

    @property
    def weights_are_masters(self) -> bool:
        """Whether what it holds as a weight is the fp32 master copy that an optimizer trains.

        A run in bf16 or fp16 computes with these, rounded.
        """
        return False

    @property
    def matched_by_order(self) -> bool:
        """Whether optimizer state is found by its order and not by a name, so that it needs a proof in the data."""
        return False
