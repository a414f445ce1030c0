"""Pretraining with a user's providers, in the form of Megatron-LM's pretrain_gpt.py.

python examples/pretrain_gpt.py tiny-gpt2 training.steps=20
torchrun --nproc-per-node 2 examples/pretrain_gpt.py tiny-gpt2 parallel=tp2

The names that Megatron-LM has in `megatron.training` are in `train_entry`; Megatron Core is unmodified.
"""

from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from train_entry.global_vars import core_transformer_config_from_args, get_args, get_batch
from train_entry.pretrain import pretrain


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    """Build a stage of Megatron Core's GPT, from the arguments of the run."""
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


class Counting(torch.utils.data.Dataset):
    """Sequences of consecutive numbers, each from its own start."""

    def __init__(self, num_samples):
        args = get_args()
        self.num_samples, self.seq_length, self.vocab_size = num_samples, args.seq_length, args.vocab_size

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        text = (97 * index + torch.arange(self.seq_length + 1)) % self.vocab_size
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }


def train_valid_test_datasets_provider(train_val_test_num_samples):
    """Return the data sets to train, validate and test with."""
    return [Counting(count) if count else None for count in train_val_test_num_samples]


def loss_func(loss_mask, output_tensor):
    """Return the sum of the losses, the number of tokens in it, and both to report."""
    loss = torch.sum(output_tensor.float() * loss_mask)
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator, model):
    """Run a microbatch through this rank's stage."""
    batch = get_batch(data_iterator)
    output_tensor = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output_tensor, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
