"""Filling of a Megatron Core model with global tensors, given by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mcore_convert.errors import MappingError, fold
from mcore_convert.formats.megatron.modules import FUSED_NORMS
from mcore_convert.spec.gpt import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

# Names of modules in the local layer spec, by Transformer Engine's names in a checkpoint.
MODULES = {
    **{f".{fused}": f".{own}" for fused, own in FUSED_NORMS.items()},
    ".mlp.experts.experts.": ".mlp.experts.local_experts.",
}


def load_weights(model: GPTModel, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy global tensors into a model of one process, in its dtype, one at a time.

    A name is the key of the `torch_dist` format with layer and expert spelled, as in
    `decoder.layers.3.mlp.linear_fc1.layer_norm_weight`. A tied model has no `output_layer.weight`; if one is given
    nevertheless, it must equal the embedding.

    Raises:
        MappingError: tensors are missing, unknown, given twice or of another shape; lists all of them.
    """
    places = parameters_of(model)
    expected = set(places)
    unknown, twice, misshaped = [], [], []
    tied: torch.Tensor | None = None
    filled: set[str] = set()
    with torch.no_grad():
        for name, tensor in weights:
            module = module_name(name)
            if module == OUTPUT and module not in expected:
                tied = tensor
            elif module not in expected:
                unknown.append(name)
            elif module in filled:
                twice.append(name)
            elif places[module].shape != tensor.shape:
                misshaped.append(f"{name}: {list(tensor.shape)}, where the model has {list(places[module].shape)}")
                filled.add(module)
            else:
                places[module].copy_(tensor)
                filled.add(module)
    if tied is not None and not _same(tied, places[EMBEDDING]):
        misshaped.append(f"{OUTPUT}: differs from {EMBEDDING}, to which the model ties it")
    problems = [
        *(f"missing: {key}" for key in fold(key for key in places if key not in filled)),
        *(f"unknown: {key}" for key in fold(unknown)),
        *(f"given twice: {key}" for key in fold(twice)),
        *(f"does not fit: {each}" for each in misshaped),
    ]
    if problems:
        raise MappingError("these weights do not fill the model", items=problems)


def parameters_of(model: GPTModel) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint must fill: parameters and stored buffers, by the names of their modules."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def module_name(key: str) -> str:
    """Return the name of a weight in a model of the local layer spec, from its key in a checkpoint."""
    for theirs, ours in MODULES.items():
        key = key.replace(theirs, ours)
    return key


def _same(tensor: torch.Tensor, embedding: torch.Tensor) -> bool:
    return tensor.shape == embedding.shape and torch.equal(tensor.to(embedding.dtype), embedding)
