"""The model card of an export: `README.md`, with the metadata that the Hub reads and the origin of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.identify import Model
from mcore_convert.checkpoints.manifest import MANIFEST
from mcore_convert.checkpoints.runs import History, Run
from mcore_convert.formats.files.model_folder import CARD
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.layers import ATTENTION, EXPERTS, LINEAR, MAMBA, MLP
from mcore_convert.storage.codecs import Quantised
from mcore_convert.storage.sources import Limit, text_of
from mcore_convert.version import VERSION

TEMPLATE = Path(__file__).with_name("card.md.jinja")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Metadata of the original's card that also applies to a model derived from it.
INHERITED = ("license", "license_name", "license_link", "language")
TAGS = ("megatron-core", "mcore-convert")

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Card:
    """Facts of an export that are known before its tensors are written.

    `repo` is its repository on the Hub, `revision` its branch there; None where it has none, or is on
    the main branch. `dtypes` are those of the source, `dtype` that of the written weights; if they are `quantised`,
    after decoding.
    """

    model: Model
    run: Run | None
    history: History
    config: Mapping[str, Any]
    dtypes: tuple[str, ...]
    dtype: str
    has_tokenizer: bool
    has_chat_template: bool
    title: str
    repo: str | None = None
    revision: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    quantised: Quantised | None = None


def render(card: Card, checksum: str) -> bytes:
    """Render the card as Markdown, without the machine or the time, so that equal exports have equal cards."""
    from huggingface_hub import ModelCard, ModelCardData

    tables = [("Architecture", [*_architecture(card)]), ("Training", [*_training(card)])]
    tables.append(("How it was made", [*_provenance(card), ("checksum of the weights", f"`{checksum}`")]))
    made = ModelCard.from_template(
        ModelCardData(**metadata_of(card)),
        template_str=TEMPLATE.read_text(),
        title=card.title,
        summary=_summary(card),
        model=_model_words(card),
        has_tokenizer=card.has_tokenizer,
        has_chat_template=card.has_chat_template,
        tables=[(heading, rows) for heading, rows in tables if rows],
        picture=card.run.picture.name if card.run and card.run.picture else None,
    )
    return f"{str(made).strip()}\n".encode(errors="backslashreplace")


def metadata_of(card: Card) -> dict[str, Any]:
    """Return the metadata of the card: as given by the user, else from the original's card and the run."""
    folder = card.model.folder
    base = base_model(card.history.base_model, card.config)
    fields = {
        "base_model": base,
        **(inherited(folder / CARD) if folder is not None else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [*TAGS, str(card.config.get("model_type", card.model.family.name))],
        **card.metadata,
    }
    return {name: value for name, value in fields.items() if value is not None}


def inherited(file: Path) -> dict[str, Any]:
    """Return the metadata of a card that also applies to a derived model; empty if it has no readable metadata."""
    from huggingface_hub import ModelCard

    if not file.is_file():
        return {}
    try:
        data = ModelCard(text_of(file, Limit.CARD), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # errors of YAML and of the client: a broken card is no reason to refuse
        return {}
    return {name: data[name] for name in INHERITED if data.get(name)}


def base_model(stated: str | None, config: Mapping[str, Any]) -> str | None:
    """Return the name on the Hub of the model that training started from, if known."""
    for name in (stated, config.get("_name_or_path")):
        if isinstance(name, str) and HUB_ID.fullmatch(name) and not Path(name).exists():
            return name
    return None


def _summary(card: Card) -> str:
    kind = next(iter(card.config.get("architectures") or ()), card.model.family.name)
    count = f"{card.model.num_parameters:,}"
    iteration = (
        f", exported from iteration {card.history.iteration:,} of its training" if card.history.iteration else ""
    )
    return f"A `{kind}` of {count} parameters in {card.dtype}{iteration}."


def _model_words(card: Card) -> str:
    """Return the arguments of a loading function: the repository, or the reader's current directory."""
    if card.repo is None:
        return '"."'
    return f'"{card.repo}"' + (f', revision="{card.revision}"' if card.revision else "")


ACTIVATIONS = {"swiglu": "SwiGLU", "quick_geglu": "gated quick GELU", "squared_relu": "squared ReLU"}


def _architecture(card: Card) -> Iterator[tuple[str, str]]:
    dims, args = card.model.dims, card.model.args
    heads = str(dims.num_attention_heads)
    if dims.num_query_groups != dims.num_attention_heads:
        heads += f", {dims.num_query_groups} for keys and values"
    activation = next((words for name, words in ACTIVATIONS.items() if args.get(name)), "GELU")
    rope = f"rotary, base {args.get('rotary_base'):,}" if args.get("rotary_base") else "rotary"
    if args.get("use_rope_scaling"):
        rope += f", scaled by {args.get('rope_scaling_factor'):g}"
    positions = {"rope": rope, "yarn": f"{rope}, scaled by YaRN", "learned_absolute": "learned"}
    yield "family", card.model.family.name
    yield "parameters", f"{card.model.num_parameters:,}"
    yield "layers", str(dims.num_layers)
    yield "hidden size", f"{dims.hidden_size:,}"
    yield "attention heads", heads
    if mixers := dims.layers_with(MAMBA):
        heads_of = f"{dims.mamba_num_heads} heads of {dims.mamba_head_dim}"
        yield "Mamba", f"in {len(mixers)} of {dims.num_layers} layers, {heads_of}"
        yield "attention", f"in {len(dims.layers_with(ATTENTION))} of {dims.num_layers} layers"
    if linear := dims.layers_with(LINEAR):
        yield "linear attention", f"in {len(linear)} of {dims.num_layers} layers, by the gated delta rule"
    if mlps := dims.layers_with(MLP):
        where = f", in {len(mlps)} of {dims.num_layers} layers" if dims.pattern else ""
        yield "feed-forward size", f"{dims.ffn_hidden_size:,}, {activation}{where}"
    if dims.num_experts:
        count = len(dims.layers_with(EXPERTS))
        where = "in each layer" if count == dims.num_layers else f"in {count} of {dims.num_layers} layers"
        yield "experts", f"{dims.num_experts} {where}, of which a token takes {args.get('moe_router_topk')}"
        yield "feed-forward size of an expert", f"{dims.moe_ffn_hidden_size:,}, {activation}"
    if dims.shared_ffn_hidden_size:
        yield "feed-forward size of the shared expert", f"{dims.shared_ffn_hidden_size:,}"
    yield "norm", str(args.get("normalization"))
    yield "positions", positions.get(str(args.get("position_embedding_type")), str(args.get("position_embedding_type")))
    yield "context", f"{dims.max_position_embeddings:,} tokens"
    yield "vocabulary", f"{dims.vocab_size:,}"
    yield "embeddings", "tied" if dims.tied else "untied"
    yield "dtype", card.dtype


def _training(card: Card) -> Iterator[tuple[str, str]]:
    history = card.history
    if history.iteration is None:
        return
    of_all = f" of {history.last_iteration:,}" if history.last_iteration else ""
    yield "iteration", f"{history.iteration:,}{of_all}"
    if history.tokens:
        yield "tokens", f"{history.tokens:,}"
    if history.batch:
        yield "batch", f"{history.batch[0]:,} x {history.batch[1]:,} tokens"
    for name, loss in (card.run.loss_at(history.iteration) if card.run else {}).items():
        yield ("loss" if name == "train" else f"loss, {name}"), f"{loss:.4f}"
    if history.data:
        names = [name if weight is None else f"{name} ({weight:g})" for name, weight in history.data]
        yield "data", ", ".join(f"`{name}`" for name in names)


def _layout(card: Card) -> str:
    """Return the layout of the run in words: `tp 2, pp 2, on 4 ranks`."""
    checkpoint = card.model.checkpoint
    if checkpoint.common.args is None:
        return ""
    args = normalise(checkpoint.common.args)
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    sizes = {short: args[name] for short, name in names.items() if isinstance(args.get(name), int)}
    if not sizes:
        return ""
    if not args.get("num_experts") or sizes.get("etp") == sizes.get("tp"):
        sizes.pop("etp", None)  # Megatron-LM fills it in where experts are cut like other weights, or absent
    kept = {short: size for short, size in sizes.items() if size > 1 or short in ("tp", "pp", "etp")}
    ranks = args.get("world_size")
    words = ", ".join(f"{short} {size}" for short, size in kept.items())
    return f"{words}, on {ranks} rank{'s' * (ranks != 1)}" if isinstance(ranks, int) else words


def _provenance(card: Card) -> Iterator[tuple[str, str]]:
    checkpoint, dims = card.model.checkpoint, card.model.dims
    yield "made with", f"`mcore-convert export` {VERSION}"
    name = (
        f"`{checkpoint.path.resolve().name}` of `{card.run.name}`"
        if card.run
        else f"`{checkpoint.path.resolve().name}`"
    )
    yield "manifest", f"`{MANIFEST}`, which `mcore-convert verify .` checks the files against"
    yield "source", f"{name}, in the format `{checkpoint.format}`"
    layout = _layout(card)
    if layout:
        yield "parallel layout of the source", layout
    stored = " and ".join(card.dtypes)
    cast = card.dtypes != (card.dtype,)
    rounded = "" if card.dtype == "float32" else ", rounded to nearest"
    yield "dtype of the source", f"{stored}, cast to {card.dtype}{rounded}" if cast else stored
    if checkpoint.quantised is not None:
        yield "decoded", f"{checkpoint.quantised}, to {checkpoint.quantised.dtype}"
    if card.quantised is not None:
        yield "quantised", f"{card.quantised}; {card.quantised.loss} is lost"
    if card.model.ignored:
        yield "unknown keys of `config.json`, taken to change nothing", ", ".join(card.model.ignored)
    if dims.padded_vocab_size != dims.vocab_size:
        yield "embedding of the source", f"{dims.padded_vocab_size:,} rows, of which {dims.vocab_size:,} are kept"
