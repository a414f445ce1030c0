"""Weights for programs, without a file in between: tensors under their Hugging Face names, and a transformers model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_convert import companions
from mcore_convert.conversion import plan_conversion
from mcore_convert.elements import CAST_BLOCK, Files, cast
from mcore_convert.errors import ConfigError, ConvertError
from mcore_convert.execute import BEYOND_HINT, prove
from mcore_convert.formats import hf
from mcore_convert.hf_tensors import HfTensor, hf_tensors
from mcore_convert.hub import local_path
from mcore_convert.identify import Model, identify
from mcore_convert.plan import Plan, find_weights
from mcore_convert.spec.arguments import DTYPES
from mcore_convert.targets import Target
from mcore_convert.tensors import DTYPE_SIZES, file_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PathLike = str | Path


def iter_hf_weights(
    path: PathLike,
    *,
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    hf_config: PathLike | None = None,
    ignore_keys: Sequence[str] = (),
    vocab_size: int | None = None,
    given: Mapping[str, Any] | None = None,
    allow_drift: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint under their Hugging Face names, one by one, in the order of the forward pass.

    Each is a new tensor on the CPU; no more memory is held than the one that is being made. A tied head does not come,
    as it is in no `model.safetensors`. The checkpoint is proven whole before the first is made.

    Args:
        path: a checkpoint in any format, the directory of a training run, or a Hub id.
        dtype: cast to it, rounding to nearest; as stored unless given.
        family, hf_config, vocab_size, given, allow_drift: as for `convert`.

    Raises:
        ConvertError: it cannot be read, or is no model that transformers has.
    """
    model = _identified(path, family, hf_config, ignore_keys, vocab_size, given)
    plan = _planned(model, dtype, allow_drift)
    with file_errors():
        prove(plan.checks)
    sources = find_weights(model.family, model.dims, model.checkpoint, allow_drift=allow_drift)
    return _tensors(list(hf_tensors(model.family, model.dims, sources)), _name_of(dtype))


def load_hf_model(
    path: PathLike,
    *,
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    hf_config: PathLike | None = None,
    ignore_keys: Sequence[str] = (),
    vocab_size: int | None = None,
    given: Mapping[str, Any] | None = None,
    allow_drift: bool = False,
    **options: Any,
) -> Any:
    """A transformers model straight from a checkpoint in any format: what `from_pretrained` makes of its conversion.

    Args:
        path, dtype, family, hf_config, vocab_size, given, allow_drift: as for `iter_hf_weights`.
        options: for `from_pretrained` (`device_map`, `attn_implementation`).

    Raises:
        ConvertError: as `iter_hf_weights`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

    model = _identified(path, family, hf_config, ignore_keys, vocab_size, given)
    plan = _planned(model, dtype, allow_drift)
    content: dict[str, Any] = json.loads(plan.reservation.texts[plan.reservation.path / hf.CONFIG])
    weights = iter_hf_weights(
        path,
        dtype=dtype,
        family=family,
        hf_config=hf_config,
        ignore_keys=ignore_keys,
        vocab_size=vocab_size,
        given=given,
        allow_drift=allow_drift,
    )
    config = AutoConfig.for_model(**content)
    stored = config.dtype if dtype is None else dtype
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = kind.from_pretrained(None, config=config, state_dict=dict(weights), dtype=stored, **options)
    generation = companions.generation_config(model, content, None, replace=False)
    if generation:
        loaded.generation_config = GenerationConfig.from_dict(generation)
    return loaded


def _identified(
    path: PathLike,
    family: str | None,
    hf_config: PathLike | None,
    ignore_keys: Sequence[str],
    vocab_size: int | None,
    given: Mapping[str, Any] | None,
) -> Model:
    with file_errors():
        config = None if hf_config is None else Path(hf_config)
        return identify(
            local_path(str(path)),
            family=family,
            hf_config=config,
            ignore_keys=ignore_keys,
            vocab_size=vocab_size,
            given=given,
        )


def _planned(model: Model, dtype: str | torch.dtype | None, allow_drift: bool) -> Plan:
    """The plan of a conversion that is not run: the proof that the model is whole, and its configuration."""
    nowhere = Path("nowhere")
    with file_errors():
        return plan_conversion(model, Target(nowhere, "hf", allow_drift=allow_drift, dtype=_name_of(dtype)))


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
                    bits[at] = cast(tensor.read(files, box), tensor.meta.dtype, wanted)
                except OverflowError as error:
                    raise ConvertError(f"`{tensor.name}` has {error}", hint=BEYOND_HINT) from error
            yield tensor.name, torch.from_numpy(whole).view(getattr(torch, wanted))
            del whole, bits  # before the next one is made
