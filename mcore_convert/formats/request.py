"""The order to write a checkpoint, and the files that a format lays out for it before the first tensor byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_convert.formats.base import Training
from mcore_convert.formats.random_states import RandomStates
from mcore_convert.formats.traits import LayerSpec
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.releases import NEWEST, Release


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


@dataclass(frozen=True)
class Request:
    """What shall be written, completely: a format lays it out and decides nothing but where it lies.

    `dtype_of` has the dtype of every weight, and of its states where the optimizer goes along. `config` is the
    `config.json` of a target on Hugging Face's side, `common` the common state of one on Megatron's (its `args` are a
    dict), with `training` where the optimizer goes along, `random_states` where those of the ranks do, and `run_config`
    for Megatron-Bridge. `iteration` names the directory `iter_*`; None writes `release`. `options` are those of the
    format. `layer_spec` says whose names the modules have, `norm_state` whether the norm at the end is Transformer
    Engine's all the same, and `release` which Megatron-LM will load it.
    """

    path: Path
    family: Family
    dims: Dims
    dtype_of: Mapping[Item, str]
    options: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = Layout()
    iteration: int | None = None
    training: Training | None = None
    run_config: str | None = None
    random_states: RandomStates | None = None
    layer_spec: LayerSpec | None = None
    norm_state: bool = False
    release: Release = NEWEST
