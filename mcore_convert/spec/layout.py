"""Layouts of a model over ranks: tensor, pipeline, virtual pipeline and expert parallelism.

The stage sizes are those of Megatron Core 0.16 (`get_num_layers_to_build`, `PipelineParallelLayerLayout`); the first
layer of a stage follows from them, since layers are assigned in the order (virtual stage, pipeline rank).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mcore_convert.errors import LayoutError
from mcore_convert.spec import hybrid
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.layers import MLP
from mcore_convert.spec.pipeline_layout import LAYER, MTP, problems_of, stages_of


class Rank(NamedTuple):
    """Coordinates of one process that holds its own part of the model.

    `etp` is the index of its expert shard; None if `tp` determines it, which it does if ETP divides TP.
    """

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int | None = None


# Bounds the time and memory that a damaged number can cost. No cluster is as large.
MAX_RANKS = 2**18


class Stage(NamedTuple):
    """One pipeline stage: virtual stage `vpp` of pipeline rank `pp`. The order is that of the forward pass."""

    vpp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and the options for uneven stages.

    `first_stage_layers`, `last_stage_layers`: `--decoder-first/last-pipeline-num-layers`. `account_for_embedding`,
    `account_for_loss`: the embedding or the loss counts as a layer in the size of its stage. `pipeline_layout`:
    `--pipeline-model-parallel-layout`, one letter per layer and `|` between stages (`Ettt|(tt|)*2tL`).
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    pipeline_layout: str | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or not 1 <= size <= MAX_RANKS):
                raise LayoutError(f"`{name}` = {str(size)[:40]} is not a size")
        for name in ("first_stage_layers", "last_stage_layers"):
            if not isinstance(getattr(self, name), int | None):
                raise LayoutError(f"`{name}` = {str(getattr(self, name))[:40]} is not a number of layers")
        if self.tp * self.pp * self.ep > MAX_RANKS:
            raise LayoutError(f"tp = {self.tp}, pp = {self.pp}, ep = {self.ep} are more than {MAX_RANKS:,} ranks")
        uneven = self.first_stage_layers is not None or self.last_stage_layers is not None
        if uneven and (self.account_for_embedding or self.account_for_loss):
            raise LayoutError("uneven first or last stages cannot be combined with counting the embedding or the loss")
        if self.pipeline_layout is not None:
            count = len(stages_of(self.pipeline_layout))
            if count % self.pp or (self.vpp is not None and count != self.pp * self.vpp):
                raise LayoutError(
                    f"the pipeline layout `{self.pipeline_layout}` has {count} stages, "
                    f"which do not fit pp = {self.pp}, vpp = {self.vpp or 1}"
                )
            if count // self.pp > 1:  # the pipeline layout determines the number of virtual stages
                object.__setattr__(self, "vpp", count // self.pp)

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Layout:
        """Return the layout that the arguments of a run describe.

        A pipeline layout may have been stored as a parsed object, of which only the state is known.

        Raises:
            LayoutError: the layout is invalid.
        """

        def size(*names: str) -> int:
            return next((args[name] for name in names if isinstance(args.get(name), int)), 1)

        parsed = args.get("pipeline_model_parallel_layout")
        state = getattr(parsed, "state", None)
        text = state.get("input_data") if isinstance(state, dict) else parsed
        text = hybrid.pipeline_layout_of(args) or text
        pp = size("pipeline_model_parallel_size")
        return cls(
            tp=size("tensor_model_parallel_size", "model_parallel_size"),
            pp=pp,
            vpp=args.get("virtual_pipeline_model_parallel_size") if pp > 1 else None,
            ep=size("expert_model_parallel_size"),
            etp=args.get("expert_tensor_parallel_size"),
            first_stage_layers=args.get("decoder_first_pipeline_num_layers"),
            last_stage_layers=args.get("decoder_last_pipeline_num_layers"),
            account_for_embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
            account_for_loss=bool(args.get("account_for_loss_in_pipeline_split")),
            pipeline_layout=text if isinstance(text, str) else None,
        )

    @property
    def num_virtual_stages(self) -> int:
        """Number of model chunks per pipeline rank; 1 without virtual pipelining, and so without PP."""
        return (self.vpp or 1) if self.pp > 1 or self.pipeline_layout is not None else 1

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same number of layers."""
        fixed = (self.first_stage_layers, self.last_stage_layers, self.pipeline_layout)
        return fixed == (None, None, None) and not (self.account_for_embedding or self.account_for_loss)

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share an expert: `tp`, unless `etp` is given."""
        return self.etp or self.tp

    @property
    def ranks_per_stage(self) -> int:
        """Smallest number of ranks of a pipeline stage: a multiple of TP, and of ETP x EP."""
        return math.lcm(self.tp, self.expert_tp * self.ep)

    def ranks(self) -> Iterator[Rank]:
        """Yield every rank that holds its own part: TP x PP x EP of them,
        fewer if experts have fewer shards than the rest, and more if they have more.

        Ranks are numbered over TP, and at the same time over ETP and EP (Megatron Core, `parallel_state.py`,
        `RankGenerator`).
        """
        is_implied = self.tp % self.expert_tp == 0
        for pp in range(self.pp):
            for number in range(self.ranks_per_stage):
                ep, etp = number // self.expert_tp % self.ep, number % self.expert_tp
                yield Rank(number % self.tp, pp, ep, None if is_implied else etp)

    def cut_at(self, rank: Rank, *, is_expert: bool) -> tuple[int, int]:
        """Return the number of shards of a weight, and the index of a rank's shard."""
        parts = self.expert_tp if is_expert else self.tp
        return parts, rank.etp if is_expert and rank.etp is not None else rank.tp % parts

    def stages(self, num_layers: int) -> dict[Stage, range]:
        """Return the global indices of the decoder layers on each stage, in the order of the forward pass.

        Raises:
            LayoutError: the layers do not fit the stages.
        """
        counts = self._counts(num_layers)
        if sum(counts.values()) != num_layers or min(counts.values()) < 0:
            raise LayoutError(
                f"{num_layers} layers do not fit this pipeline: its stages take {list(counts.values())} layers"
            )
        layers: dict[Stage, range] = {}
        start = 0
        for stage, count in counts.items():
            layers[stage] = range(start, start + count)
            start += count
        return layers

    def mtp_stage(self, num_layers: int) -> Stage:
        """Return the stage with the layers that predict further tokens: the last one,
        unless the pipeline layout puts them elsewhere.

        `num_layers` are those of the decoder. From Megatron Core 0.16, `get_mtp_num_layers_to_build`.
        """
        stages = list(self.stages(num_layers))
        if self.pipeline_layout is not None:
            letters = zip(stages, stages_of(self.pipeline_layout), strict=True)
            return next((stage for stage, text in letters if MTP in text), stages[-1])
        return stages[-1]

    def experts(self, num_experts: int, ep: int) -> range:
        """Return the global indices of the experts on expert-parallel rank `ep`.

        Raises:
            LayoutError: the experts cannot be divided evenly.
        """
        if num_experts % self.ep:
            raise LayoutError(f"`num_experts` = {num_experts} cannot be split over ep = {self.ep}")
        local = num_experts // self.ep
        return range(ep * local, (ep + 1) * local)

    def of_model(self, dims: Dims) -> Layout:
        """Return the layout with unsharded experts if Megatron Core does not shard them, unless `etp` is given."""
        return replace(self, etp=1) if dims.expert_bias and self.etp is None and self.tp > 1 else self

    def check(self, dims: Dims) -> None:
        """Check whether Megatron Core can build a model of these sizes on this layout.

        Raises:
            LayoutError: it cannot; with every reason.
        """
        problems = self._tensor_problems(dims, self.tp)
        if dims.num_experts and dims.size("moe_ffn") % self.expert_tp:
            problems.append(f"`moe_ffn_hidden_size` = {dims.size('moe_ffn')} cannot be split over {self._expert_cut}")
        if dims.expert_bias and self.expert_tp > 1:
            problems.append(
                f"experts have biases, which Megatron Core does not split over {self._expert_cut}: give etp = 1"
            )
        if dims.num_experts is not None and dims.num_experts % self.ep:
            problems.append(f"`num_experts` = {dims.num_experts} cannot be split over ep = {self.ep}")
        if dims.num_experts is None and self.ep > 1:
            problems.append(f"ep = {self.ep} needs a model with experts")
        try:
            self.stages(dims.num_layers)
        except LayoutError as error:
            problems.append(error.message)
        problems += self._pipeline_problems(dims.mtp_num_layers)
        if len(problems) == 1:
            raise LayoutError(problems[0], hint=self._divisors(dims))
        if problems:
            raise LayoutError("the model does not fit this layout", items=problems, hint=self._divisors(dims))

    def _pipeline_problems(self, mtp_num_layers: int) -> list[str]:
        """Return why Megatron Core builds no such stages, although every layer has a place."""
        fixed = {
            f"`{name}` = {value}": value
            for name in ("first_stage_layers", "last_stage_layers")
            if (value := getattr(self, name)) is not None
        }
        if self.pipeline_layout is not None:
            beside = [f"{stated} beside the pipeline layout `{self.pipeline_layout}`" for stated in fixed]
            return [*beside, *problems_of(self.pipeline_layout, self.pp, mtp_num_layers)]
        if len(fixed) == self.pp == 2 and self.num_virtual_stages > 1:
            return [f"{' and '.join(fixed)} leave no stage between, by which Megatron Core divides: give one of them"]
        return [f"{stated} leaves a stage without layers" for stated, value in fixed.items() if value < 1]

    @property
    def _expert_cut(self) -> str:
        return f"tp = {self.tp}" if self.etp is None else f"etp = {self.etp}"

    @staticmethod
    def _tensor_problems(dims: Dims, tp: int) -> list[str]:
        """Return why the weights cannot be split over `tp` ranks;
        several ranks may share a query group (Megatron Core 0.16).
        """
        sizes = {"num_attention_heads": dims.num_attention_heads}
        if dims.layers_with(MLP):
            sizes["ffn_hidden_size"] = dims.ffn_hidden_size
        if dims.shared_ffn_hidden_size:
            sizes["moe_shared_expert_intermediate_size"] = dims.shared_ffn_hidden_size
        if dims.linear_num_key_heads and dims.linear_num_value_heads:
            sizes |= {name: getattr(dims, name) for name in ("linear_num_key_heads", "linear_num_value_heads")}
        if dims.mamba_num_heads and dims.mamba_num_groups:
            sizes |= {name: getattr(dims, name) for name in ("mamba_num_heads", "mamba_num_groups")}
        problems = [f"`{name}` = {size} cannot be split over tp = {tp}" for name, size in sizes.items() if size % tp]
        groups = dims.num_query_groups
        if dims.is_latent:
            return problems
        if (groups % tp and tp % groups) or dims.size("qkv") % tp:
            problems.append(f"`num_query_groups` = {groups} cannot be split over tp = {tp}")
        return problems

    def _divisors(self, dims: Dims) -> str:
        fits = [tp for tp in range(1, dims.num_attention_heads + 1) if not self._tensor_problems(dims, tp)]
        return f"tp can be {', '.join(map(str, fits))} for this model; pp must divide its {dims.num_layers} layers"

    def _counts(self, num_layers: int) -> dict[Stage, int]:
        order = [Stage(vpp, pp) for vpp in range(self.num_virtual_stages) for pp in range(self.pp)]
        if self.pipeline_layout is not None:
            stages = stages_of(self.pipeline_layout)
            return {stage: letters.count(LAYER) for stage, letters in zip(order, stages, strict=True)}
        per_rank = self._layers_per_rank(num_layers)
        counts = {}
        for stage in order:
            if per_rank[stage.pp] % self.num_virtual_stages:
                raise LayoutError(
                    f"{per_rank[stage.pp]} layers on pipeline rank {stage.pp} cannot be split over vpp = {self.vpp}"
                )
            counts[stage] = per_rank[stage.pp] // self.num_virtual_stages
        counts[order[0]] -= self.account_for_embedding
        counts[order[-1]] -= self.account_for_loss
        return counts

    def _layers_per_rank(self, num_layers: int) -> list[int]:
        """Return the number of layers per pipeline rank, with the embedding and the loss if they count as layers."""
        fixed = {}
        if self.first_stage_layers is not None:
            fixed[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            fixed[self.pp - 1] = self.last_stage_layers
        free = self.pp - len(fixed)
        left = num_layers + self.account_for_embedding + self.account_for_loss - sum(fixed.values())
        empty = bool(fixed) and free > 0 and left == 0  # Megatron Core refuses middle stages without layers
        if left < 0 or (left % free if free else left) or empty:
            raise LayoutError(f"{left} layers cannot be split evenly over {free} pipeline stages")
        return [fixed.get(pp, left // free if free else 0) for pp in range(self.pp)]
