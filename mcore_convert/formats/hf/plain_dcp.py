"""Format `dcp`: torch DCP directories with Hugging Face's tensor names, as FSDP2 writes them. Read only.

accelerate and transformers' Trainer write `pytorch_model_fsdp_0/` with `model.` before each name (accelerate 1.x,
`utils/fsdp_utils.py`, `save_fsdp_model`); torchtitan writes the names of its own model, which are Hugging Face's if the
model is one of transformers, together with the optimizer (`torchtitan/components/checkpoint.py`). The configuration is
in the directory or above it, or is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.formats.base import Side
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.model_folder import CONFIG
from mcore_convert.formats.hf.checkpoint import WEIGHT_FILES
from mcore_convert.formats.hf.names import HfNames
from mcore_convert.formats.megatron.dcp_kinds import Kind, kind_of
from mcore_convert.formats.traits import Storage
from mcore_convert.spec.family import Family
from mcore_convert.storage.views import Slot, Sum, TensorMeta

DCP = "dcp"
MODEL_FOLDER = "pytorch_model_fsdp_0"  # of accelerate, inside a checkpoint's directory with the other files
OPTIMIZER = re.compile(r"(optimizer|optim)\.")
BESIDE = re.compile(r"(optimizer|optim|lr_scheduler|scheduler|dataloader|train_state|rng_state|random_states)\b")


def detect(path: Path) -> bool:
    """Return whether a directory has this format, or has the folder of accelerate and no other weights."""
    if dcp.exists(path):
        return kind_of(path) is Kind.HUGGING_FACE
    return dcp.exists(path / MODEL_FOLDER) and not any((path / name).is_file() for name in WEIGHT_FILES)


@dataclass(frozen=True)
class DcpCheckpoint(HfNames):
    """An open directory. `before` is the prefix of all names of weights, known once the family is."""

    directory: dcp.Directory
    config: Mapping[str, Any] | None
    folder: Path | None
    before: str = ""
    prefix: str = ""
    format: str = DCP
    side: Side = Side.HUGGING_FACE

    @cached_property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {key: meta for key, meta in self.directory.tensors.items() if not BESIDE.match(key)}

    @cached_property
    def original_config(self) -> Mapping[str, Any] | None:
        """Configuration with the dtype of the tensors: FSDP keeps the weights of a 16-bit model in float32."""
        dtypes = {meta.dtype for meta in self.tensors.values()}
        if self.config is None or len(dtypes) != 1:
            return self.config
        named = [key for key in ("dtype", "torch_dtype") if key in self.config]
        return {**self.config, **dict.fromkeys(named or ["torch_dtype"], *dtypes)}

    @property
    def companions(self) -> Path | None:
        return self.folder

    @property
    def optimizer_keys(self) -> list[str]:
        return [key for key in (*self.directory.tensors, *self.directory.objects) if OPTIMIZER.match(key)]

    def storage(self) -> Storage:
        return Storage(self.directory.num_files, "torch.distributed.checkpoint")

    def check_whole(self) -> None:
        """Check that every file exists and that the chunks of every weight tile it.

        Raises:
            UnreadableCheckpoint: as `dcp.Directory.check`.
        """
        self.directory.check(self.tensors)

    @property
    def sums(self) -> Iterator[Sum]:
        return self.directory.sums

    def named_for(self, family: Family) -> DcpCheckpoint:
        names = {name for row in family.weights if not row.per_layer for name in row.hf}
        names |= {name.removeprefix(family.optional_prefix) for name in names}
        before = (key.removesuffix(name) for key in self.tensors for name in names if f".{key}".endswith(f".{name}"))
        return replace(self, prefix=family.optional_prefix, before=min(before, key=len, default=""))

    def key_of(self, name: str) -> str:
        return f"{self.before}{name}"

    def meta_of(self, name: str) -> TensorMeta | None:
        return self.tensors.get(self.key_of(name))

    def parts_of(self, name: str) -> list[Slot]:
        return self.directory.slots(self.key_of(name))


def open_dcp(path: Path, args: Mapping[str, Any] | None = None) -> DcpCheckpoint:
    """Open a directory: `.metadata`, and an optional configuration in it or beside accelerate's folder.

    Args:
        args: Megatron arguments, which are ignored.

    Raises:
        UnreadableCheckpoint: the metadata or the configuration is damaged.
    """
    path = path if dcp.exists(path) else path / MODEL_FOLDER
    folders = [path, *([path.absolute().parent] if path.absolute().name == MODEL_FOLDER else [])]
    folder = next((each for each in folders if (each / CONFIG).is_file()), None)
    return DcpCheckpoint(path, dcp.read(path), None if folder is None else read_json(folder / CONFIG), folder)
