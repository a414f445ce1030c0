"""Weights for programs, without an intermediate file: Hugging Face tensors by name, and transformers models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from mcore_convert.checkpoints.checks import prove
from mcore_convert.checkpoints.download import local_path
from mcore_convert.checkpoints.identify import Model, identify
from mcore_convert.conversion.copying import BEYOND_HINT
from mcore_convert.conversion.plan import Plan
from mcore_convert.conversion.prepare import plan_conversion
from mcore_convert.conversion.target import Target
from mcore_convert.errors import ConfigError, ConvertError
from mcore_convert.formats.base import Side
from mcore_convert.formats.files.model_folder import CONFIG
from mcore_convert.formats.registry import default_target
from mcore_convert.options import FamilyOptions, PathLike, SourceOptions, check_names, part_of
from mcore_convert.publishing import companions
from mcore_convert.publishing.hf_tensors import HfTensor, hf_tensors
from mcore_convert.spec.config.arguments import DTYPES
from mcore_convert.storage.elements import CAST_BLOCK, Files
from mcore_convert.storage.views import DTYPE_SIZES, file_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def iter_hf_weights(
    path: PathLike, *, dtype: str | torch.dtype | None = None, **options: Unpack[SourceOptions]
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a checkpoint under their Hugging Face names, in the order of the forward pass.

    Each is a new tensor on the CPU; memory holds no more than the tensor in progress. A tied head is left out,
    as it is from `model.safetensors`. The checkpoint is proven complete before the first tensor is made.

    Args:
        path: a checkpoint in any format, the directory of a training run, or a Hub id.
        dtype: cast to it, rounding to nearest; as stored unless given.
        options: how the checkpoint is read, as listed in `mcore_convert.options.SourceOptions`.

    Raises:
        ConvertError: it cannot be read, or transformers has no such model.
        TypeError: an option does not exist.
    """
    check_names("iter_hf_weights", SourceOptions, options)
    _, plan = _planned(path, dtype, options)
    return _proven(plan, dtype)


def load_hf_model(path: PathLike, *, dtype: str | torch.dtype | None = None, **options: Any) -> Any:
    """Build the transformers model of a checkpoint in any format, as `from_pretrained` does from its conversion.

    Args:
        path, dtype: as for `iter_hf_weights`.
        options: those of `iter_hf_weights`; the others go to `from_pretrained` (`device_map`, `attn_implementation`).

    Raises:
        ConvertError: as `iter_hf_weights`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

    own = part_of(SourceOptions, options)
    model, plan = _planned(path, dtype, own)
    content: dict[str, Any] = json.loads(plan.reservation.texts[plan.reservation.path / CONFIG])
    config = AutoConfig.for_model(**content)
    stored = config.dtype if dtype is None else dtype
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    rest = {name: value for name, value in options.items() if name not in own}
    weights = dict(_proven(plan, dtype))
    loaded = kind.from_pretrained(None, config=config, state_dict=weights, dtype=stored, **rest)
    generation = companions.generation_config(model, content, None, replace=False)
    if generation:
        loaded.generation_config = GenerationConfig.from_dict(generation)
    return loaded


def _planned(path: PathLike, dtype: str | torch.dtype | None, options: SourceOptions) -> tuple[Model, Plan]:
    """Plan a conversion that is not run, as proof that the model is complete, and for its configuration."""
    nowhere = Path("nowhere")
    with file_errors():
        model = identify(local_path(str(path)), given=options.get("given"), **part_of(FamilyOptions, options))
        drift = options.get("allow_drift", False)
        target = Target(nowhere, default_target(Side.HUGGING_FACE), allow_drift=drift, dtype=_name_of(dtype))
        return model, plan_conversion(model, target)


def _proven(plan: Plan, dtype: str | torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Prove the data of a plan's source, and return its tensors."""
    with file_errors():
        prove(plan.checks)
    return _tensors(list(hf_tensors(plan.family, plan.dims, plan.sources)), _name_of(dtype))


def _name_of(dtype: str | torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"there is no dtype `{name}` of weights", hint=f"known are {', '.join(DTYPES)}")
    return name


def _tensors(tensors: list[HfTensor], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    import torch

    with Files() as files:
        for tensor in tensors:
            wanted = dtype or tensor.meta.dtype
            whole = np.empty(tensor.meta.shape, f"i{DTYPE_SIZES[wanted]}")
            bits = whole.view(f"u{whole.itemsize}")
            for box in tensor.blocks(CAST_BLOCK):
                at = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
                try:
                    bits[at] = tensor.read(files, box, wanted)
                except OverflowError as error:
                    raise ConvertError(f"`{tensor.name}` has {error}", hint=BEYOND_HINT) from error
            yield tensor.name, torch.from_numpy(whole).view(getattr(torch, wanted))
            del whole, bits  # free the memory before the next tensor
