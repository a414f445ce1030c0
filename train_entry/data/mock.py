"""Synthetic data: no input, any length, determined by the seed, with a rule that a model learns in a few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from train_entry.config.schema import Config

# Only this many tokens of the vocabulary occur, spread evenly over it, so that the loss falls at once for any size.
TOKENS = 256
STRIDE = 3  # from one token to the next, in the order of those that occur
NOISE = 0.1  # share of tokens that follow no rule, so that the loss has a lower bound above zero


class Mock(Dataset[dict[str, Tensor]]):
    """Samples in which each token determines the next, except for noise. Sample i depends only on the seed and i."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.occurring = min(TOKENS, vocab_size)
        self.seq_length = seq_length
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng((*self.seed, index))
        count = self.seq_length + 1
        rule = random.integers(self.occurring) + STRIDE * np.arange(count)
        noise = random.integers(self.occurring, size=count)
        order = np.where(random.random(count) < NOISE, noise, rule % self.occurring)
        text = torch.from_numpy(order * self.vocab_size // self.occurring)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }


def mock_datasets(config: Config, vocab_size: int, num_samples: tuple[int, int, int]) -> list[Mock | None]:
    """Return the data sets to train, validate and test with; None if no samples are requested."""
    training = config.training
    return [
        Mock(vocab_size, training.seq_length, count, (training.seed, split)) if count else None
        for split, count in enumerate(num_samples)
    ]
