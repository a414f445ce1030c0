"""The command lines of Megatron-LM as data: what each version's parser accepts, takes for a type, and refuses."""

from __future__ import annotations

import pytest

from fixtures import megatron_flags

COMMON = "--num-layers 4 --lr 3e-4 --moe-layer-freq [0]*1+[1]*3 --moe-router-load-balancing-type aux_loss --bf16"


@pytest.mark.parametrize("version", megatron_flags.VERSIONS)
def test_a_line_is_parsed_with_the_types_of_the_version(version: str) -> None:
    args = megatron_flags.parse(COMMON, version)
    assert (args.num_layers, args.lr, args.moe_layer_freq, args.bf16) == (4, 3e-4, [0, 1, 1, 1], True)
    listed = version != "0.12"  # several losses at a time came later
    assert args.moe_router_load_balancing_type == (["aux_loss"] if listed else "aux_loss")
    assert (args.transformer_impl, args.use_distributed_optimizer) == ("transformer_engine", False)


@pytest.mark.parametrize("version", megatron_flags.VERSIONS)
@pytest.mark.parametrize(
    "line",
    [
        "--no-such-flag",
        "--num-layer 4",
        "--num-layers four",
        "--num-layers",
        "--transformer-impl huggingface",
        "--moe-layer-freq '[0, 1]'",
    ],
)
def test_a_line_that_the_version_refuses_is_refused(version: str, line: str) -> None:
    with pytest.raises(megatron_flags.UnknownLine):
        megatron_flags.parse(line, version)


def test_the_versions_differ() -> None:
    megatron_flags.parse("--dist-ckpt-optim-fully-reshardable", "0.16")
    with pytest.raises(megatron_flags.UnknownLine, match="dist-ckpt-optim-fully-reshardable"):
        megatron_flags.parse("--dist-ckpt-optim-fully-reshardable", "0.12")
