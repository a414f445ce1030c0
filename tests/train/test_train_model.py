"""Computation of the model in training, against Megatron Core's own attention, layers, loss and optimizer helpers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mcore_convert.errors import ConfigError
from mcore_convert.megatron.cpu import import_megatron, without_cuda
from mcore_convert.megatron.model import Choices, build_model
from mcore_convert.megatron.norm import Norm
from mcore_convert.megatron.parallel import model_parallel, single_process
from tests.ranks import run_ranks
from train_entry.config.schema import Config
from train_entry.flows.fine_tuning import segment_mask
from train_entry.model import loss
from train_entry.model.attention import SdpaAttention
from train_entry.model.choices import select
from train_entry.model.compiled import compile_layers
from train_entry.model.gpt import model_class
from train_entry.model.layers import graph_settings, graph_spec, sdpa_spec
from train_entry.model.loss import vocab_parallel_cross_entropy
from train_entry.optimizer.foreach import foreach_optimizers, fuse

HEADS, CHANNELS, TOKENS, SAMPLES = 4, 8, 24, 2


CPU = torch.device("cpu")


LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "vocab_size": 60,
    "padded_vocab_size": 60,
    "max_position_embeddings": TOKENS,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


GPT2 = {
    **LLAMA,
    "num_query_groups": 4,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
}


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to rounding, relative to the largest element."""
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def config_of(**fields: Any) -> Any:
    """As much of a `TransformerConfig` as both attentions ask for."""
    import_megatron()
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS}
    others = {"attention_dropout": 0.0, "cuda_graph_scope": [], "use_cpu_initialization": True}
    return TransformerConfig(**{**sizes, **others, **fields})


def attention_of(kind: type[torch.nn.Module], config: Any, **groups: Any) -> torch.nn.Module:
    from megatron.core.transformer.enums import AttnMaskType

    module: torch.nn.Module = kind(
        config=config,
        layer_number=2,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=SimpleNamespace(**groups) if groups else None,
    )
    return module


def heads(groups: int) -> list[Tensor]:
    """Query, key and value."""
    torch.manual_seed(3)
    return [torch.randn(TOKENS, SAMPLES, each, CHANNELS, requires_grad=True) for each in (HEADS, groups, groups)]


def attended(module: torch.nn.Module, inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return the output, and the gradients of the inputs."""
    output = module(*inputs, mask)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


SEGMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 20 + [1] * 4])


@pytest.fixture
def alone() -> Iterator[None]:
    import_megatron()
    with single_process():
        yield


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scaled_by_layer", [False, True])
def test_attention_is_that_of_megatron(alone: None, groups: int, packed: bool, scaled_by_layer: bool) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    config = config_of(num_query_groups=groups, apply_query_key_layer_scaling=scaled_by_layer)
    mask = segment_mask(SEGMENTS) if packed else None
    ours, theirs = (
        attended(attention_of(k, config), heads(groups), mask) for k in (SdpaAttention, DotProductAttention)
    )
    for actual, expected in zip(ours, theirs, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_draws_the_dropout_of_megatron(alone: None, sequence_parallel: bool) -> None:
    """From the stream of this tensor-parallel rank, and on the CPU the very same numbers."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    config = config_of(num_query_groups=2, attention_dropout=0.3)
    config.sequence_parallel = sequence_parallel  # which TransformerConfig refuses without tensor parallelism
    result, states = [], []
    for kind in (SdpaAttention, DotProductAttention):
        get_cuda_rng_tracker().reset()
        model_parallel_cuda_manual_seed(5)
        torch.manual_seed(6)
        with torch.random.fork_rng():
            result.append(attended(attention_of(kind, config), heads(2), None))
            states.append((torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]))
    for actual, expected in zip(*result, strict=True):
        close(actual, expected)
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours, theirs)


def rows_of(tokens: int, ranks: int, rank: int) -> Tensor:
    """Return the tokens that a context-parallel rank holds, in its order: as Megatron cuts a batch."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    rows: Tensor = get_batch_on_this_cp_rank({"tokens": torch.arange(tokens)[None]}, group)["tokens"][0]
    return rows


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_ranks_that_share_a_sequence_is_exact(ranks: int, packed: bool) -> None:
    mask = segment_mask(SEGMENTS) if packed else None
    inputs = heads(2)
    whole = attended(attention_of(SdpaAttention, config_of(num_query_groups=2)), inputs, mask)
    parts = run_ranks(ranks, _attended_in_part, packed)
    for number, expected in enumerate(whole):
        result = torch.empty_like(expected)
        for rows, part in parts:
            result[rows] = part[number]
        close(result, expected)


def _attended_in_part(packed: bool) -> tuple[Tensor, list[Tensor]]:
    config = config_of(num_query_groups=2)
    config.context_parallel_size = dist.get_world_size()
    rows = rows_of(TOKENS, dist.get_world_size(), dist.get_rank())
    module = attention_of(SdpaAttention, config, cp=dist.group.WORLD)
    inputs = [each.detach()[rows].requires_grad_() for each in heads(2)]
    output = module(*inputs, segment_mask(SEGMENTS)[:, :, rows] if packed else None)
    weights = torch.randn(TOKENS, *output.shape[1:], generator=torch.Generator().manual_seed(4))[rows]
    return rows, [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def logits_and_labels(words: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels, weights = torch.randint(words, (7, 3)), torch.rand(7, 3)
    return 4 * torch.randn(7, 3, 12), labels, torch.where(weights < 0.3, 0.0, weights)  # some tokens are masked out


def expected_loss(words: int) -> tuple[Tensor, Tensor]:
    logits, labels, weights = logits_and_labels(words)
    logits.requires_grad_()
    losses = functional.cross_entropy(logits[..., :words].flatten(0, 1), labels.flatten(), reduction="none")
    (losses.view(7, 3) * weights).sum().backward()
    assert logits.grad is not None
    return losses.detach().view(7, 3), logits.grad


@pytest.mark.parametrize("chunk", [1, 30, 2**28])
@pytest.mark.parametrize("words", [12, 9])
def test_the_loss_is_the_cross_entropy(chunk: int, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK", chunk)
    result = _loss_of_part(words, None)
    for actual, expected in zip(result, expected_loss(words), strict=True):
        close(actual, expected, 1e-6)


@pytest.mark.parametrize(("ranks", "words"), [(2, 12), (2, 9), (3, 7)])
def test_the_loss_over_ranks_that_share_the_vocabulary(ranks: int, words: int) -> None:
    """Also where a rank's rows are padding only: words 0 to 6 of 12 leave rows 8 to 11 without any."""
    result = run_ranks(ranks, _loss_of_part, words, "all")
    losses, gradient = expected_loss(words)
    for actual, _ in result:
        close(actual, losses, 1e-6)
    close(torch.cat([part for _, part in result], -1), gradient, 1e-6)


def _loss_of_part(words: int, group: str | None) -> tuple[Tensor, Tensor]:
    logits, labels, weights = logits_and_labels(words)
    ranks = dist.group.WORLD if group else None
    if ranks is not None:
        logits = logits.chunk(ranks.size(), -1)[ranks.rank()]
    logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(logits * 1, labels, ranks, vocab_size=words)
    (losses * weights).sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


def test_the_loss_goes_backward_once_only() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits * 1, torch.tensor([0, 1, 2]))
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        losses.sum().backward()


def step_of(args: dict[str, Any], choices: Choices | None, *, compiled: bool = False) -> dict[str, Tensor]:
    """Losses of two samples and the gradients of all weights, from weights of a seed."""
    settings = {"perform_initialization": True, **(choices.settings if choices else {})}
    torch.manual_seed(1)
    kept = choices or Choices()
    model = build_model(args, choices=Choices(settings, kept.block_spec, kept.model_class)).train()
    if compiled:
        compile_layers([model])
    tokens = torch.randint(60, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(TOKENS).expand(SAMPLES, -1)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous())
    losses.mean().backward()
    return {"": losses.detach(), **{name: each.grad for name, each in model.named_parameters()}}


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "gpt2": (GPT2, {}),
    "half of the channels turn": ({**LLAMA, "rotary_percent": 0.5}, {}),
    "pairs of channels turn": (LLAMA, {"rotary_interleaved": True}),
    "norms of queries and keys": ({**LLAMA, "qk_layernorm": True}, {}),
    "recomputed": (
        LLAMA,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", [sdpa_spec, graph_spec])
def test_layers_are_those_of_megatron(alone: None, shape: str, spec: Any) -> None:
    """Loss and gradients of our attention, graph layers, rotary tables and loss, against the local spec and loss."""
    args, settings = SHAPES[shape]
    model = model_class(60, rotary_tables=spec is graph_spec)
    extra = graph_settings(args) if spec is graph_spec else {}
    ours, theirs = step_of(args, Choices({**settings, **extra}, spec, model)), step_of(args, Choices(settings))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        close(ours[name], theirs[name])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("args", "ranks"), [(GPT2, 2), (LLAMA, 4)])  # the latter has a group of heads on two ranks
def test_graph_layers_over_tensor_parallel_ranks(args: dict[str, Any], ranks: int, sequence_parallel: bool) -> None:
    """Their linear layers send what Megatron's do."""
    for ours, theirs in run_ranks(ranks, _graph_and_local, args, sequence_parallel):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            close(ours[name], theirs[name])


def _graph_and_local(args: dict[str, Any], sequence_parallel: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    settings = {"sequence_parallel": sequence_parallel}
    with model_parallel(dist.get_world_size(), 1):
        ours = step_of(args, Choices(settings, graph_spec, model_class(60, rotary_tables=True)))
        return ours, step_of(args, Choices(settings))


def test_norms_are_marked_for_sequence_parallelism() -> None:
    """Megatron's `finalize_model_grads` sums the gradients of such weights over tensor-parallel ranks."""
    for chosen in (False, True):
        config = SimpleNamespace(
            layernorm_zero_centered_gamma=False, normalization="LayerNorm", sequence_parallel=chosen
        )
        assert [each.sequence_parallel for each in Norm(config, 4).parameters()] == [chosen] * 2  # type: ignore[attr-defined]


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_entry.model.choices.compiler_missing", lambda _: "no compiler is there")
    for training, parallel, message in (
        ({"transformer_impl": "transformer_engine"}, {}, "not installed"),
        ({"attention": "unfused"}, {"cp": 2}, "context parallelism"),
        ({"attention": "unfused", "compile": "layers"}, {}, "does not go with"),
        ({"compile": "layers"}, {}, "no compiler is there"),
    ):
        config = Config().with_values(training=training, parallel=parallel)
        with pytest.raises(ConfigError, match=message):
            select(config, {"vocab_size": 60}, CPU)


def test_what_falls_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_entry.model.choices.compiler_missing", lambda _: "no compiler is there")
    config = Config().with_values(training={"recompute": "selective"})
    chosen = select(config, {"vocab_size": 60}, torch.device("cuda"))
    assert chosen.choices.block_spec is sdpa_spec
    assert chosen.choices.settings == {"recompute_granularity": None}
    assert [remark.split()[0] for remark in chosen.remarks] == ["Selective", "Layers"]
    assert select(Config(), {"vocab_size": 60}, CPU).remarks == ()


def gradients() -> list[torch.nn.Parameter]:
    """Parameters whose gradients differ in size by far."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(each)) for each in (3, 70, 1, 1000)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn_like(parameter) * 10**number
    return parameters


def test_the_norm_of_gradients_and_clipping_are_those_of_megatron(alone: None) -> None:
    from megatron.core.optimizer import clip_grads

    def clipped() -> tuple[float, list[Tensor]]:
        parameters = gradients()
        grads = [each.grad for each in parameters if each.grad is not None]
        norm = clip_grads.get_grad_norm_fp32(grads, grad_stats_parallel_group=dist.group.WORLD)
        clip_grads.clip_grad_by_total_norm_fp32(parameters, 1.0, norm)
        return norm, grads

    fallback = clip_grads.l2_norm_impl
    with without_cuda():
        theirs = clipped()
        with foreach_optimizers(), foreach_optimizers():
            assert clip_grads.l2_norm_impl is not fallback
            ours = clipped()
    assert clip_grads.l2_norm_impl is fallback
    exact = math.hypot(*(float(each.grad.double().norm()) for each in gradients() if each.grad is not None))
    assert ours[0] == pytest.approx(exact, rel=1e-7)
    assert ours[0] == pytest.approx(theirs[0], rel=2e-7)
    for actual, expected in zip(ours[1], theirs[1], strict=True):
        close(actual, expected, 2e-7)


def test_copies_of_all_tensors_at_once(alone: None) -> None:
    from megatron.core.optimizer import optimizer

    sources = [torch.randn(5), torch.randn(3).bfloat16()]
    targets = [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(3)]
    with foreach_optimizers():
        optimizer._multi_tensor_copy_this_to_that(this=sources, that=targets, overflow_buf=None)
        optimizer._multi_tensor_copy_this_to_that([], [])
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.to(target.dtype), target)


def test_fused_adamw_goes_on_from_where_another_was() -> None:
    """Flags that a checkpoint brought are set right again, and its counts of steps taken along."""

    def trained(switch: bool) -> list[Tensor]:
        parameters = gradients()
        adam = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
        for step in range(4):
            if switch and step == 2:
                fuse(SimpleNamespace(optimizer=adam))
                assert adam.param_groups[0]["fused"]
            adam.step()
        return [each.detach() for each in parameters]

    for actual, expected in zip(trained(True), trained(False), strict=True):
        close(actual, expected, 1e-6)
