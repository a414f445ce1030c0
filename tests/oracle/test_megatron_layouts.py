"""Megatron Core's model on the CPU over several ranks, and what the room refuses and leaves behind."""

from __future__ import annotations

import warnings
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from mcore_convert.errors import ConfigError, LayoutError, MappingError
from mcore_convert.megatron.logits import logits
from mcore_convert.megatron.model import build_model, build_stages
from mcore_convert.megatron.parallel import model_parallel, single_process
from mcore_convert.megatron.weights import load_weights
from tests.oracle.test_megatron_room import (
    HIDDEN,
    LLAMA,
    MODELS,
    TOLERANCE,
    VOCAB,
    Weights,
    llama,
    llama_weights,
    tokens,
)
from tests.ranks import RankError, run_ranks


def test_weights_that_do_not_fill_the_model_are_all_named(alone: None) -> None:
    weights = llama_weights(llama())
    weights.pop("decoder.layers.0.mlp.linear_fc2.weight")
    weights.pop("decoder.layers.1.mlp.linear_fc2.weight")
    weights["decoder.layers.1.mlp.linear_fc3.weight"] = torch.zeros(1)
    weights["output_layer.weight"] = torch.zeros(VOCAB + 1, HIDDEN)
    twice = ("decoder.final_layernorm.weight", torch.zeros(HIDDEN))
    with pytest.raises(MappingError) as refusal:
        load_weights(build_model(LLAMA), [*weights.items(), twice])
    assert refusal.value.items == (
        "missing: decoder.layers.{0...1}.mlp.linear_fc2.weight",
        "unknown: decoder.layers.1.mlp.linear_fc3.weight",
        "given twice: decoder.final_layernorm.weight",
        f"does not fit: output_layer.weight: [{VOCAB + 1}, {HIDDEN}], where the model has [{VOCAB}, {HIDDEN}]",
    )


def test_a_tied_output_layer_must_equal_the_embedding(alone: None) -> None:
    model = build_model({**LLAMA, "untie_embeddings_and_output_weights": False})
    weights = llama_weights(llama(tie_word_embeddings=True))
    load_weights(model, weights.items())
    with pytest.raises(MappingError, match="do not fill") as refusal:
        load_weights(model, {**weights, "output_layer.weight": weights["output_layer.weight"] + 1}.items())
    assert refusal.value.items == (
        "does not fit: output_layer.weight: differs from embedding.word_embeddings.weight, to which the model ties it",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_scaling_factor": 4.0}, "rotary_scaling_factor = 4.0"),
        ({"qk_l2_norm": True}, "qk_l2_norm = True"),
        ({"position_embedding_type": "mrope"}, "`position_embedding_type` = 'mrope'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"padded_vocab_size": None}, "padded_vocab_size or vocab_size"),
    ],
)
def test_arguments_that_cannot_be_built_are_refused_by_name(change: dict[str, Any], message: str, alone: None) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_model({**LLAMA, **change})
    assert message in str(refusal.value)


def test_nothing_is_left_behind() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    before = (torch.cuda.current_device, torch.Tensor.cuda, random.CudaRNGStatesTracker)
    for _ in range(2):
        with single_process(), single_process():
            assert dist.is_initialized()
        assert not dist.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
    if not torch.cuda.is_available():
        assert (torch.cuda.current_device, torch.Tensor.cuda, random.CudaRNGStatesTracker) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA it is Megatron Core's own")
def test_random_streams_are_independent_and_nest(alone: None) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 11)
    tracker.add("b", 12)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(11))
    torch.manual_seed(5)
    outside = torch.rand(2, generator=torch.Generator().manual_seed(5))
    drawn = [torch.rand(1)]
    with tracker.fork("a"):
        first = torch.rand(1)
        with tracker.fork("b"):
            torch.rand(7)
            with tracker.fork("a"):
                second = torch.rand(1)
        third = torch.rand(1)
    with tracker.fork("a"):
        fourth = torch.rand(1)
    drawn.append(torch.rand(1))
    assert torch.equal(torch.cat([first, second, third, fourth]), expected)
    assert torch.equal(torch.cat(drawn), outside)
    with pytest.raises(ValueError, match="`c` was not added"), tracker.fork("c"):
        pass
    with pytest.raises(ValueError, match="exists already"):
        tracker.add("a", 13)


@pytest.mark.parametrize("name", ["gpt2-gelu_new", "llama-gqa"])
def test_layouts_compute_the_same(name: str) -> None:
    """Tensor and pipeline parallelism, also interleaved; filled from global tensors by Megatron's own slices."""
    args = {**MODELS[name][1], "num_layers": 4}
    with single_process():
        whole = build_model(args)
        state = whole.state_dict()
        generator = torch.Generator().manual_seed(2)
        full = {
            key: torch.randn(each.shape, generator=generator) * 0.15 for key, each in state.items() if each is not None
        }
        whole.load_state_dict({**state, **full})
        expected = logits(whole, tokens())

    def under(tp: int, pp: int, vpp: int | None) -> Tensor:
        with model_parallel(tp, pp, vpp):
            stages = build_stages(args)
            for stage in stages:
                _fill_by_sharded_state_dict(stage, full)
            return logits(stages, tokens())

    for layout in [(4, 1, None), (1, 2, 2), (2, 2, None)]:  # also more ranks than query groups
        for got in run_ranks(layout[0] * layout[1], under, *layout):
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def _fill_by_sharded_state_dict(stage: Any, full: Weights) -> None:
    from mcore_convert.megatron.weights import module_name

    sharded = stage.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    for entry in sharded.values():
        built = entry.build() if hasattr(entry, "build") else entry
        for part in built if isinstance(built, list) else [built]:
            if hasattr(part, "global_slice"):
                part.data.copy_(full[module_name(part.key)][part.global_slice()].view_as(part.data))


def test_ranks_that_do_not_fit_are_refused() -> None:
    def wrong() -> str:
        with pytest.raises(LayoutError, match="2 ranks cannot be laid out as tp = 3"), model_parallel(3, 1):
            pass
        with pytest.raises(LayoutError, match="among 2 ranks"), single_process():
            pass
        return "refused"

    assert run_ranks(2, wrong) == ["refused", "refused"]


def test_the_harness_ends_what_it_started_and_says_what_failed() -> None:
    import os
    import time

    def fails() -> None:
        if os.environ.get("RANK") != "0" and torch.distributed.get_rank() == 1:
            raise RuntimeError("rank one is unwell")
        time.sleep(60)

    before = psutil.Process().children()  # commands that start warm, perhaps
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*rank one is unwell"):
        run_ranks(2, fails)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 were not done in time"):
        run_ranks(2, time.sleep, 60, timeout=0.5)
    assert time.monotonic() - began < 20
    assert psutil.Process().children() == before


def test_importing_the_room_is_quiet() -> None:
    import subprocess
    import sys

    code = (
        "import sys, mcore_convert.megatron, mcore_convert.megatron.cpu, mcore_convert.megatron.parallel; "
        "assert not {'torch', 'megatron.core'} & set(sys.modules); "
        "mcore_convert.megatron.cpu.import_megatron(); assert 'megatron.core' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_building_does_not_warn(alone: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core\.")
        logits(build_model(LLAMA), tokens())
