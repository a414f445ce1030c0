"""The request to write a checkpoint, and the files that a format lays out for it before tensors are written."""

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
    """The files of a checkpoint before tensors are written: sizes, known bytes, and files that are written last."""

    path: Path
    sizes: dict[Path, int] = field(default_factory=dict)
    literals: list[tuple[Path, int, bytes]] = field(default_factory=list)
    carried: dict[Path, Path] = field(default_factory=dict)  # target -> source, copied unchanged
    texts: dict[Path, bytes] = field(default_factory=dict)  # written after the tensors, in this order

    @property
    def nbytes(self) -> int:
        """Size of the checkpoint on disk in bytes, without the carried files."""
        return sum(self.sizes.values()) + sum(len(text) for text in self.texts.values())


@dataclass(frozen=True)
class Request:
    """Complete description of the checkpoint to write: a format only decides on the places.

    `dtype_of` has the dtype of every weight, and of its states if the optimizer is converted. `config` is the
    `config.json` of a target on Hugging Face's side, `common` the common state of one on Megatron's (its `args` are a
    dict), with `training` if the optimizer is converted, `random_states` if those are transferred, and `run_config` for
    Megatron-Bridge. `iteration` names the directory `iter_*`; None writes `release`. `options` are those of the format.
    `layer_spec` gives the names of modules, `norm_state` tells whether the final norm is Transformer Engine's with any
    layer spec, and `release` is the Megatron-LM that will load the checkpoint.
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
