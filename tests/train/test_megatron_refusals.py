"""Refusals of a run are those of Megatron Core, and sizes are those that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mcore_convert.errors import LayoutError
from mcore_convert.megatron.cpu import import_megatron
from tests.train.test_train_refusals import reasons, tiny, tiny_with
from train_entry.arguments import megatron_arguments
from train_entry.config.estimate import estimate
from train_entry.config.layouts import layout_of, problems_of_model, ranks_of
from train_entry.config.refusals import problems_of_schedule
from train_entry.config.schema import Config

# against Megatron Core


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    import_megatron()
    torch.set_num_threads(1)


def core_refuses(**fields: Any) -> bool:
    """Return whether Megatron Core builds no configuration of these fields, or stages that are not the model."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    try:
        config = TransformerConfig(pipeline_dtype=torch.float32, cuda_graph_scope=[], **fields)
        vpp = config.virtual_pipeline_model_parallel_size
        stages = itertools.product(range(config.pipeline_model_parallel_size), range(vpp) if vpp else [None])
        counts = [get_num_layers_to_build(config, stage, pp) for pp, stage in stages]
    except (ValueError, AssertionError):
        return True
    return bool(min(counts) < 1)  # it lets a last stage have more layers than are left


def test_heads_are_refused_as_megatron_core_does() -> None:
    seen = set()
    for heads, shared, tp in itertools.product((4, 6, 8), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 8)):
        if shared > heads or heads % shared:
            continue  # Megatron Core does not look at that
        args = {"num_attention_heads": heads, "num_query_groups": shared, "hidden_size": 24 * heads}
        ours = bool([*problems_of_model(tiny_with(parallel={"tp": tp}), args)])
        theirs = core_refuses(num_layers=4, tensor_model_parallel_size=tp, **args)
        assert ours == theirs, (args, tp)
        seen.add(ours)
    assert seen == {True, False}


def test_stages_are_refused_as_megatron_core_does() -> None:
    seen = set()
    firsts, vpps = (None, 0, 1, 2, 4), (None, 2, 3)
    for layers, pp, vpp, first, last in itertools.product((4, 5, 6, 12), (2, 3, 4), vpps, firsts, firsts):
        parallel = {"pp": pp, "vpp": vpp, "first_stage_layers": first, "last_stage_layers": last}
        config = tiny_with(parallel=parallel)
        ours = bool([*problems_of_model(config, {"num_layers": layers}), *_about_stages(config)])
        theirs = core_refuses(
            num_layers=layers,
            hidden_size=16,
            num_attention_heads=4,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        assert ours == theirs, (layers, parallel)
        seen.add(ours)
    assert seen == {True, False}


def _about_stages(config: Config) -> Iterator[str]:
    from train_entry.config.layouts import problems_of_layout

    return (line for line in problems_of_layout(config) if "stage_layers" in line)


def test_the_schedule_is_refused_as_megatron_core_does() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    class Nothing:
        param_groups: tuple[Any, ...] = ()

    seen = set()
    styles, numbers = ("cosine", "constant", "WSD"), (0, 4, 5, 6)
    for style, warmup, min_lr, wsd in itertools.product(styles, numbers, (0.0, 1.0, 2.0), (None, 1)):
        schedule = {"style": style, "warmup_steps": warmup, "wsd_decay_steps": wsd, "decay_steps": 5}
        config = tiny_with(schedule=schedule, optimizer={"lr": 1.0, "min_lr": min_lr})
        beyond = style == "WSD" and wsd is not None and wsd > 5 - warmup
        try:
            OptimizerParamScheduler(
                Nothing(), 0.0, 1.0, min_lr, warmup, 5, style, 0.1, 0.1, 5, "constant", wsd_decay_steps=wsd
            )
        except AssertionError:
            theirs = True
        else:
            theirs = beyond  # which it would count backwards from before the warmup
        assert bool([*problems_of_schedule(config)]) == theirs, (schedule, min_lr)
        seen.add(theirs)
    assert seen == {True, False}


def test_what_is_refused_of_recomputation_fails_in_megatron_core() -> None:
    assert forward_fails(num_layers=3, recompute_num_layers=2)
    assert reasons(tiny("model.num_layers=3", "training.recompute=full", "training.recompute_num_layers=2"))
    assert not forward_fails(num_layers=4, recompute_num_layers=2)
    assert not reasons(tiny("model.num_layers=4", "training.recompute=full", "training.recompute_num_layers=2"))


def forward_fails(num_layers: int, recompute_num_layers: int) -> bool:
    config = tiny(
        f"model.num_layers={num_layers}",
        "training.recompute=full",
        f"training.recompute_num_layers={recompute_num_layers}",
    )
    try:
        forward(config)
    except IndexError:
        return True
    return False


def forward(config: Config) -> int:
    """Run one microbatch through the model of a run; return the bytes that are kept for the backward pass, without
    weights.
    """
    from mcore_convert.megatron.parallel import single_process
    from train_entry.model_provider import model_provider

    kept: dict[int, torch.Tensor] = {}
    with single_process():
        (model,) = model_provider(config, megatron_arguments(config, None))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.zeros(config.training.micro_batch_size, config.training.seq_length, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, torch.arange(tokens.shape[1])[None], None, labels=tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# what a run will need


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("distributed", [False, True])
def test_bytes_of_a_parameter_are_those_of_megatrons_documentation(precision: str, dp: int, distributed: bool) -> None:
    """docs/user-guide/features/dist_optimizer.md: the table of theoretical bytes, d data-parallel ranks."""
    config = tiny(f"training.precision={precision}", f"parallel.distributed_optimizer={distributed}")
    result = estimate(config, megatron_arguments(config, None), dp)
    split = dp if distributed else 1
    expected = {"fp32": 8 + 8 / split, "bf16": 6 + 12 / split}[precision]
    assert (result.weights + result.gradients + result.optimizer) / result.num_local_parameters == expected


def test_kept_activations_are_those_that_autograd_keeps() -> None:
    config = tiny("training.attention=unfused")  # what `forward` builds
    assert estimate(config, megatron_arguments(config, None), 1).activations == pytest.approx(forward(config), rel=0.25)


def test_microbatches_under_way_fill_the_first_rank() -> None:
    """1F1B: as many as there are ranks. With virtual stages, more of them, each of a smaller part."""
    sizes = {}
    for name in ("single", "pp2", "pp2-vpp2"):
        config = tiny(f"parallel={name}", "model.vocab_size=1", "training.global_batch_size=64", source="tiny-llama")
        result = estimate(config, megatron_arguments(config, None), ranks_of(config.parallel))
        sizes[name] = result.activations - (128 * 128 * 8 if name == "single" else 0)  # of one stage: its logits
    assert sizes["pp2"] == sizes["single"]
    assert sizes["pp2-vpp2"] == sizes["single"] * 5 // 4  # 2 + 2 + 1 quarters


def test_a_layout_reads_as_in_conversion() -> None:
    config = tiny_with(parallel={"tp": 2, "pp": 2, "vpp": 1})
    assert layout_of(config.parallel).num_virtual_stages == 1
    with pytest.raises(LayoutError):
        layout_of(tiny_with(parallel={"pp": 3}).parallel).stages(4)
