"""Direct preference optimization (Rafailov et al., 2023) as a user's flow and data set.

mcore-convert train finetune checkpoint.init=MODEL data.dataset=dpo:Preferences data.paths=[pairs.jsonl] \
    training.flow=dpo:Dpo training.flow.beta=0.1 training.micro_batch_size=2

in this folder, or with it on PYTHONPATH. A line of `pairs.jsonl` has `prompt`, `chosen` and `rejected`. Batch sizes
count rows, two for a pair.
"""

import json
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from torch.nn.functional import logsigmoid

from train_entry.flows import Loss, sum_over_sequence


class Dpo:
    """Flow whose loss rewards the chosen answer over the rejected one, relative to a frozen model."""

    rows_per_sample = 2
    reference = True

    class Options(BaseModel):
        """`beta`: weight of the distance from the reference."""

        beta: float = Field(0.1, gt=0)

    def __init__(self, config, options):
        self.beta = options.beta

    def forward(self, model, batch):
        """Return the losses of the tokens: their negative log-probabilities."""
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(self, output, batch):
        """Return the loss of each pair, with its reward margin and the share of pairs whose chosen answer is ahead."""
        gained = (batch["reference"].float() - output.float()) * batch["loss_mask"]
        rewards = self.beta * sum_over_sequence(gained)
        margins = rewards[0::2] - rewards[1::2]
        metrics = {"margin": margins.sum(), "accuracy": (margins > 0).sum()}
        return Loss(-logsigmoid(margins).sum(), torch.tensor(len(margins)), metrics)


class Preferences(torch.utils.data.Dataset):
    """Pairs of answers: rows 2i and 2i + 1 are the chosen and the rejected one of pair i."""

    def __init__(self, config, split, num_samples, tokenizer):
        self.seq_length, self.hf, self.eod = config.training.seq_length, tokenizer.hf, tokenizer.eod
        paths = config.data.paths or getattr(config.data, f"{split}_paths")
        lines = [line for path in paths for line in Path(path).read_text().splitlines()]
        self.pairs = [json.loads(line) for line in lines if line.strip()]

    def __len__(self):
        return 2 * len(self.pairs)

    def __getitem__(self, index):
        number, side = divmod(index, 2)
        pair = self.pairs[number]
        prompt = self.hf(pair["prompt"])["input_ids"]
        answer = self.hf(pair["rejected" if side else "chosen"], add_special_tokens=False)["input_ids"]
        text = torch.tensor([*prompt, *answer, self.eod])[: self.seq_length + 1]
        tokens, labels, mask = (torch.zeros(self.seq_length, dtype=torch.int64) for _ in range(3))
        count = len(text) - 1
        tokens[:count], labels[:count], mask[len(prompt) - 1 : count] = text[:-1], text[1:], 1
        positions = torch.arange(self.seq_length)
        return {"tokens": tokens, "labels": labels, "loss_mask": mask.float(), "position_ids": positions}
