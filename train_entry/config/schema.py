"""The fields of a training run's configuration, group by group: their types, bounds and defaults.

Fields in tokens, samples or steps are marked as such. `None` means: as in the checkpoint that training starts from, or
else Megatron's own default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Precision = Literal["fp32", "bf16", "fp16"]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


def at_home(value: Any) -> Any:
    """Replace a leading `~` of a path by the home directory."""
    is_there = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return str(Path(value).expanduser()) if is_there else value


Location = Annotated[Path, BeforeValidator(at_home)]
Named = Annotated[str, BeforeValidator(at_home)]  # a path, or another name: a Hub id, a prefix of files


class Group(BaseModel):
    """Group of fields. A key that is not among them is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Model(Group):
    """The architecture, under Megatron-LM's argument names. Values of a checkpoint to start from may be omitted."""

    provider: str = Field(
        "", description="`module:function` of your own that builds the model, as Megatron-LM calls it"
    )
    num_layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    ffn_hidden_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_query_groups: PositiveInt | None = Field(None, description="key and value heads; fewer than heads: grouped")
    kv_channels: PositiveInt | None = Field(None, description="size of a head; hidden_size / heads unless given")
    max_position_embeddings: PositiveInt | None = None
    vocab_size: PositiveInt | None = Field(None, description="without padding; the tokenizer's unless given")
    default_vocab_size: PositiveInt | None = Field(None, description="where no tokenizer says it, as with made-up data")
    make_vocab_size_divisible_by: PositiveInt = Field(128, description="times tp: embedding rows are padded to this")
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = None
    rotary_base: PositiveFloat | None = None
    rotary_percent: PositiveFloat | None = None
    use_rope_scaling: bool | None = None
    rope_scaling_factor: PositiveFloat | None = None
    normalization: Literal["LayerNorm", "RMSNorm"] | None = None
    norm_epsilon: PositiveFloat | None = None
    layernorm_zero_centered_gamma: bool | None = None
    qk_layernorm: bool | None = None
    swiglu: bool | None = None
    add_bias_linear: bool | None = None
    add_qkv_bias: bool | None = None
    untie_embeddings_and_output_weights: bool | None = None
    init_method_std: PositiveFloat = Field(0.02, description="standard deviation of new weights")
    hidden_dropout: BelowOne = 0.0
    attention_dropout: BelowOne = 0.0
    num_experts: PositiveInt | None = None
    moe_ffn_hidden_size: PositiveInt | None = None
    moe_router_topk: PositiveInt | None = None
    moe_router_pre_softmax: bool | None = None
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"] = "aux_loss"
    moe_aux_loss_coeff: NonNegativeFloat = 0.01
    moe_z_loss_coeff: NonNegativeFloat | None = None


class Parallel(Group):
    """The distribution of the model and its batches over ranks. The remaining ranks are data parallel."""

    tp: PositiveInt = Field(1, description="tensor-parallel size")
    pp: PositiveInt = Field(1, description="pipeline-parallel size")
    vpp: PositiveInt | None = Field(None, description="virtual pipeline stages on each pipeline rank")
    cp: PositiveInt = Field(1, description="context-parallel size")
    ep: PositiveInt = Field(1, description="expert-parallel size")
    etp: PositiveInt | None = Field(None, description="tensor-parallel size of experts; tp, or 1 with ep > 1")
    sequence_parallel: bool = False
    first_stage_layers: NonNegativeInt | None = None
    last_stage_layers: NonNegativeInt | None = None
    distributed_optimizer: bool = Field(False, description="split optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = Field(False, description="needs distributed_optimizer")
    bucket_size: PositiveInt | None = Field(None, description="elements of a gradient bucket")
    timeout_minutes: PositiveInt = Field(10, description="until a collective that waits for a lost rank gives up")


class Optimizer(Group):
    """AdamW, or SGD. Biases and norms are not decayed."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: PositiveFloat = 3e-4
    min_lr: NonNegativeFloat = 3e-5
    weight_decay: NonNegativeFloat = 0.1
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    momentum: BelowOne = Field(0.9, description="of sgd")
    clip_grad: NonNegativeFloat = Field(1.0, description="largest norm of the gradients; 0: any")
    initial_loss_scale: PositiveFloat = Field(2.0**16, description="of fp16")
    loss_scale_window: PositiveInt = Field(1000, description="steps without overflow until fp16's loss scale doubles")


class Schedule(Group):
    """The learning rate over time, in steps, from 0 through `optimizer.lr` to `optimizer.min_lr`."""

    style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = Field(None, description="step at which min_lr is reached; the last unless given")
    wsd_decay_steps: PositiveInt | None = Field(None, description="length of WSD's last phase")
    wsd_decay_style: Literal["exponential", "linear", "cosine"] = "linear"


class Data(Group):
    """The training data.

    `mock`: synthetic, without any input. `indexed`: Megatron's `.bin`/`.idx`, as `mcore-convert data prepare` writes.
    `sft`: JSONL with `prompt` and `completion`, or with `messages`; the loss is on completions only.
    """

    kind: Literal["mock", "indexed", "sft"] = "mock"
    dataset: str = Field("", description="`module:Class` of your own, in the place of a kind")
    paths: tuple[Named, ...] = Field((), description="path prefixes of indexed data, or JSONL files")
    weights: tuple[PositiveFloat, ...] = Field((), description="of each path in the blend; by size unless given")
    split: str = Field("969,30,1", description="shares of train, valid and test")
    train_paths: tuple[Named, ...] = Field((), description="instead of `paths` and `split`")
    valid_paths: tuple[Named, ...] = ()
    test_paths: tuple[Named, ...] = ()
    tokenizer: Named | None = Field(
        None, description="HF tokenizer: directory or Hub id; that of the start unless given"
    )
    cache_dir: Location | None = Field(None, description="of shuffled indices; in the run directory unless given")
    reset_position_ids: bool = Field(False, description="positions count from 0 after each end of document")
    eod_mask_loss: bool = Field(False, description="no loss on the end of a document")
    packed: bool = Field(True, description="sft: several examples in a sequence, that do not see each other")
    num_workers: NonNegativeInt = Field(0, description="processes that load data")


class Checkpoint(Group):
    """The start of training, and the run's checkpoints. Checkpoints are `torch_dist`, at any layout."""

    init: Named | None = Field(None, description="weights to start from: HF directory, Hub id or Megatron checkpoint")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub id")
    ignore_keys: tuple[str, ...] = Field((), description="unknown keys of a config.json that change nothing")
    load: Location | None = Field(None, description="run to go on from, with its optimizer; the own one unless given")
    resume: bool = Field(True, description="go on from the newest whole checkpoint of the run directory")
    save: bool = True
    save_interval: PositiveInt | None = Field(None, description="steps between checkpoints; at the end only if None")
    keep_last: PositiveInt | None = Field(None, description="older ones are removed; all are kept if None")
    save_optimizer: bool = True
    asynchronous: bool = Field(False, description="train on while a checkpoint is written")
    export_hf: Literal["never", "end", "each"] = Field("never", description="write the model for transformers, too")


class Logging(Group):
    """The metrics that a run reports, and their destinations."""

    interval: PositiveInt = Field(10, description="steps between lines")
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "mcore-convert"
    wandb_name: str | None = None
    plot: bool = Field(True, description="loss.png at the end")
    peak_tflops: PositiveFloat | None = Field(
        None, description="of one device in this precision; known for common GPUs"
    )
    profile: bool = Field(False, description="trace-RANK.json: a few steps by torch's profiler")


class Training(Group):
    """Batches, precision, and the computation of the model."""

    steps: PositiveInt = 100
    seq_length: PositiveInt = Field(128, description="tokens")
    global_batch_size: PositiveInt = Field(8, description="samples of a step, over all ranks")
    micro_batch_size: PositiveInt = Field(1, description="samples of a forward pass on one rank")
    precision: Precision = "fp32"
    seed: NonNegativeInt = 1234
    flow: str | dict[str, Any] = Field(
        "",
        description="`module:Class` of your own, or {class: module:Class, OPTION: VALUE}; by the kind of data if empty",
    )
    eval_interval: PositiveInt | None = Field(None, description="steps between evaluations; at the end only if None")
    eval_steps: NonNegativeInt = Field(0, description="global batches of an evaluation; 0: none")
    recompute: Literal["none", "selective", "full"] = Field("none", description="activations are not kept but remade")
    recompute_num_layers: PositiveInt = Field(1, description="layers of a block that `full` remakes at once")
    attention: Literal["auto", "sdpa", "unfused"] = "auto"
    compile: Literal["auto", "none", "layers"] = Field("auto", description="auto: with CUDA, and where a compiler is")
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    deterministic: bool = Field(False, description="the same bits on every run on a GPU, more slowly")
    exit_after_minutes: PositiveFloat | None = Field(None, description="save and end before a job's time is up")


class Config(Group):
    """A run: one choice of each group."""

    run_dir: Location = Path("runs/default")
    model: Model = Model()
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    training: Training = Training()

    def with_values(self, **groups: dict[str, Any]) -> Config:
        """Return the same run with some values replaced: `config.with_values(parallel={"tp": 2})`."""
        changed = {name: {**getattr(self, name).model_dump(), **values} for name, values in groups.items()}
        return Config.model_validate({**self.model_dump(), **changed})
