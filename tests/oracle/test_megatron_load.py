"""Megatron Core itself loads what we write, with default strictness, and computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_convert import convert
from mcore_convert.checkpoints.identify import identify
from tests.conftest import HfMaker
from tests.ranks import run_ranks
from tests.wide import matrix

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
TOLERANCE = 2e-5
TOKENS = (2, 16)


def transformers_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(path).eval()(tokens).logits
    return logits


def megatron_logits(path: Path, args: dict[str, Any], tokens: torch.Tensor, tp: int, pp: int) -> torch.Tensor:
    """Return the logits of a checkpoint that Megatron Core loads on this rank's layout."""
    from mcore_convert.megatron.checkpoint import load_torch_dist
    from mcore_convert.megatron.logits import logits
    from mcore_convert.megatron.model import build_stages
    from mcore_convert.megatron.parallel import model_parallel

    with model_parallel(tp, pp):
        stages = build_stages(args)
        load_torch_dist(stages, path)
        return logits(stages, tokens)


@pytest.mark.parametrize(
    ("name", "written_for_tp", "tp", "pp"),
    matrix(
        (
            (name, written, *layout)
            for name in ("gpt2", "llama-gqa", "llama-tied")
            for written in (1, 2)
            for layout in LAYOUTS
        ),
        thin=lambda name, written_for_tp, tp, pp: (
            (name, written_for_tp) == ("llama-gqa", 2) or (written_for_tp, tp, pp) == (1, 2, 2)
        ),
    ),
)
def test_megatron_loads_it_at_any_layout(
    name: str, written_for_tp: int, tp: int, pp: int, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    layers = {"n_layer": 4} if name == "gpt2" else {"num_hidden_layers": 4}
    source = hf_checkpoint(name, fill="normal", config=layers)
    convert(source, tmp_path / "out", tp=written_for_tp)
    check_logits(source, tmp_path / "out", tp, pp)


def check_logits(source: Path, converted: Path, tp: int, pp: int) -> None:
    model = identify(converted)
    vocab = model.dims.vocab_size
    # Megatron pads for its own TP, which need not be the one that the checkpoint was written for.
    padded = -(-vocab // (128 * tp)) * 128 * tp
    args = {**model.args, "padded_vocab_size": padded}
    tokens = torch.randint(0, vocab, TOKENS, generator=torch.Generator().manual_seed(0))
    wanted = transformers_logits(source, tokens)
    for logits in run_ranks(tp * pp, megatron_logits, converted / "release", args, tokens, tp, pp):
        assert (logits[..., :vocab] - wanted).abs().max() < TOLERANCE
        assert wanted.abs().max() > 0.1  # or the comparison would show nothing
