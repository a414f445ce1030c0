"""Running two checkpoints on the same tokens: Hugging Face through transformers, Megatron through its own GPTModel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_convert.checkpoints.identify import Model
from mcore_convert.checkpoints.weights import Sources, find_weights
from mcore_convert.errors import VerificationError
from mcore_convert.formats.base import Side
from mcore_convert.spec.names import PARAM, spell
from mcore_convert.storage.elements import Files, global_tensor
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# fp32 rounding in another order of summation: about 2e-6 of the largest logit on models of a few layers.
TOLERANCE = 2e-5
SEED = 0
BATCH, LENGTH = 2, 64


@dataclass(frozen=True)
class LogitsReport:
    """Largest difference of two models' logits on the same tokens, and the allowed one."""

    difference: float
    tolerance: float
    largest_logit: float
    num_tokens: int

    @property
    def within(self) -> bool:
        return self.difference <= self.tolerance


def compare_logits(
    models: Sequence[Model], sources: Sequence[Sources], *, tolerance: float, progress: Progress | None = None
) -> LogitsReport:
    """Compute the largest difference of the logits of two checkpoints, in fp32 on the CPU, on seeded random tokens.

    Args:
        sources: the weights of each model.
        tolerance: allowed difference, as a share of the largest logit, or absolute where no logit exceeds 1.

    Both models are held in memory, one after the other.
    """
    with phase(progress, "importing torch"):
        import torch

    generator = torch.Generator().manual_seed(SEED)
    dims = models[0].dims
    length = min(LENGTH, dims.max_position_embeddings)
    tokens = torch.randint(0, dims.vocab_size, (BATCH, length), generator=generator)
    first, second = (run(model, own, tokens, progress) for model, own in zip(models, sources, strict=True))
    scale = max(1.0, float(first.abs().max()))
    return LogitsReport(float((first - second).abs().max()), tolerance * scale, scale, tokens.numel())


def run(model: Model, sources: Sources, tokens: Tensor, progress: Progress | None = None) -> Tensor:
    """Compute the logits of a checkpoint, `[batch, length, vocab_size]` in fp32."""
    if model.checkpoint.side is Side.HUGGING_FACE:
        return _run_hf(model, tokens, progress)
    return _run_megatron(model, sources, tokens, progress)


def _run_hf(model: Model, tokens: Tensor, progress: Progress | None) -> Tensor:
    path = model.checkpoint.path
    if model.checkpoint.quantised is not None:  # other programs decode to their own dtypes, and at their own sizes
        hint = "decode it with `convert --to hf`, and compare the logits of that"
        raise VerificationError(f"`{path}` is quantised, and its logits depend on the program that runs it", hint=hint)
    import torch

    with phase(progress, f"building the model of {path}"):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with phase(progress, f"computing the logits of {path}"), torch.no_grad():
        logits: Tensor = network.eval()(tokens).logits
    return logits.float()


def _run_megatron(model: Model, sources: Sources, tokens: Tensor, progress: Progress | None) -> Tensor:
    with phase(progress, "importing Megatron Core"):
        from mcore_convert.megatron.logits import logits
        from mcore_convert.megatron.model import build_model
        from mcore_convert.megatron.parallel import single_process
        from mcore_convert.megatron.weights import load_weights

    with single_process():
        with phase(progress, f"building the model of {model.checkpoint.path}"):
            network = build_model({**model.args, "padded_vocab_size": model.dims.vocab_size})
            load_weights(network, tensors_of(model, sources))
        with phase(progress, f"computing the logits of {model.checkpoint.path}"):
            return logits(network, tokens)


def tensors_of(model: Model, sources: Sources | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the global tensors of a checkpoint by their Megatron names, one after the other,
    without vocabulary padding.
    """
    import torch

    if sources is None:
        sources = find_weights(model.family, model.dims, model.checkpoint)
    with Files() as files:
        for (weight, at, state), slots in sources.slots.items():
            if weight.mcore is not None and state == PARAM:
                array = global_tensor(files, slots, model.family.shape(weight, model.dims))
                dtype = getattr(torch, slots[0].view.dtype)
                yield spell(weight.mcore, at), torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype)
