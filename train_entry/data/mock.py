"""Made-up data: no input, any length, the same for the same seed, with a rule that a model learns in a few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from train_entry.config.schema import Config

# So few tokens of the vocabulary occur, spread evenly over it: a loss curve falls at once, whatever its size.
TOKENS = 256
STRIDE = 3  # from one token to the next, in the order of those that occur
NOISE = 0.1  # share of tokens that follow no rule, so that the loss has a floor above zero


class Mock(Dataset[dict[str, Tensor]]):
    """Samples in which each token says what the next is, but for some noise. Sample i depends on seed and i only."""

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
    """Data sets to train, validate and test with; None where no samples are asked for."""
    training = config.training
    return [
        Mock(vocab_size, training.seq_length, count, (training.seed, split)) if count else None
        for split, count in enumerate(num_samples)
    ]
