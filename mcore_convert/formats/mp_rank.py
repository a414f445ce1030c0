"""Format `torch`: Megatron-LM's older checkpoints, one file for each rank that holds its own part of the model.

    latest_checkpointed_iteration.txt
    iter_0000010/mp_rank_01_000/model_optim_rng.pt     tensor rank 1, pipeline rank 0 (`_EEE`: expert rank)
    iter_0000010/mp_rank_01_000/distrib_optim.pt       with the distributed optimizer

A file holds the rank's own modules: layers and experts are numbered from 0 on each, a gated `linear_fc1` is
`[gate_r; up_r]`, and what is not cut lies in every file (Megatron-LM, `megatron/training/checkpointing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats import mp_rank_layout, mp_rank_optimizer, old_classes
from mcore_convert.formats.base import Findings, Training
from mcore_convert.formats.flat import local_of
from mcore_convert.formats.modules import GROUPED, LOCAL, SEQUENTIAL, TRANSFORMER_ENGINE, name_in_module
from mcore_convert.formats.mp_rank_files import (
    MODEL_FILE,
    LocalTensor,
    RankFile,
    args_of,
    chunks_of,
    models_of,
    num_layers_of,
    read_tree,
    slots_in_global,
)
from mcore_convert.formats.mp_rank_optimizer import Proof
from mcore_convert.formats.torch_dist import CARRIED, TRACKER, Common
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item, Weight
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.names import MASTER, PARAM, Index, spell
from mcore_convert.spec.shard import Shape
from mcore_convert.tensors import Slot, TensorMeta

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Place:
    """Where a copy of a local tensor is: the rank, its model chunk, and the name in its modules."""

    rank: Rank
    chunk: int
    name: str


@dataclass(frozen=True)
class MpRankCheckpoint:
    """An open or a reserved directory of rank files.

    `implementation` and `experts` are the words of `formats.modules`; `args` are those of the run, with what the user
    gave in their stead.
    """

    path: Path
    files: Mapping[Rank, RankFile]
    args: Mapping[str, Any]
    layout: Layout
    layers: Mapping[Stage, range]
    implementation: str
    experts: str
    format: str = "torch"

    @cached_property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {
            f"{file.label(number)}{local.key}": local.meta
            for file in self.files.values()
            for number, chunk in enumerate(file.chunks)
            for local in chunk.values()
        }

    @property
    def states(self) -> tuple[str, ...]:
        return (PARAM, *mp_rank_optimizer.states_in(self._first))

    @property
    def optimizer_keys(self) -> list[str]:
        """The ranks that hold optimizer state."""
        return [f"{file.name}: optimizer" for file in self.files.values() if mp_rank_optimizer.states_in(file)]

    @cached_property
    def training(self) -> Training | None:
        return mp_rank_optimizer.training_of(self._first) if mp_rank_optimizer.states_in(self._first) else None

    @property
    def found_by_order(self) -> bool:
        return True

    @property
    def carried(self) -> Path | None:
        """The folder of a Hugging Face model's other files, where the checkpoint was converted from one."""
        folder = self.path / CARRIED
        return folder if folder.is_dir() else None

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding with its padding.

        Raises:
            UnreadableCheckpoint: there is none.
        """
        local = self._first.chunks[0].get(EMBEDDING)
        if local is None or not local.view.shape:
            raise UnreadableCheckpoint(f"`{self._first.path}` has no `{EMBEDDING}`")
        return local.view.shape[0] * self.layout.tp

    @cached_property
    def common(self) -> Common:
        """What the files hold beside tensors, as the first rank has it."""
        state = {key: value for key, value in self._first.tree.items() if not re.fullmatch(r"model\d*", key)}
        iteration = self._first.iteration
        return Common(self.args, iteration if isinstance(iteration, int) else None, state)

    @property
    def _first(self) -> RankFile:
        return self.files[Rank()]

    @cached_property
    def _stage_of(self) -> dict[int, tuple[Stage, int]]:
        return {layer: (stage, at) for stage, layers in self.layers.items() for at, layer in enumerate(layers)}

    @cached_property
    def _last(self) -> Stage:
        return max(self.layers)

    def locate(self, item: Item, dims: Dims, findings: Findings) -> list[Slot]:
        """The boxes of one global tensor; what other ranks hold again counts as used, and is given by `replicas`."""
        if item.weight.mcore is None:
            return []
        places = self._places(item, dims)
        findings.used |= {self._key(place) for place in self._copies(item, dims) if self._find(place) is not None}
        rows = self._rows(item.weight, places) if item.weight.vocab else None
        return [slot for place in places for slot in self._slots(item, place, dims, rows, findings)]

    def replicas(self, item: Item, dims: Dims) -> Iterable[tuple[Slot, str]]:
        if item.weight.mcore is None:
            return
        rows = self._rows(item.weight, self._places(item, dims)) if item.weight.vocab else None
        for place in self._copies(item, dims):
            for slot in self._slots(item, place, dims, rows, Findings()):
                yield slot, self._key(place)

    def proofs(self) -> Iterator[Proof]:
        """For every parameter its fp32 master copy, which cast to the model's dtype must equal the parameter."""
        for rank, file in self.files.items():
            for number, chunk in enumerate(file.chunks):
                for name, states in self._states[rank][number].items():
                    if MASTER in states:
                        local = chunk[name]
                        yield Proof(states[MASTER], local.view, f"{file.label(number)}{local.key}")

    @cached_property
    def _states(self) -> Mapping[Rank, Sequence[mp_rank_optimizer.ChunkStates]]:
        return {rank: mp_rank_optimizer.find_states(file, self.args) for rank, file in self.files.items()}

    def _places(self, item: Item, dims: Dims) -> list[Place]:
        """Where the first copy of each part is: one place for each tensor rank, or one where the weight is not cut."""
        stage, ep, name = self._position(item, dims)
        tensor_ranks = range(self.layout.tp) if item.weight.shard.dim is not None else [0]
        return [Place(Rank(tp, stage.pp, ep or 0), stage.vpp, name) for tp in tensor_ranks]

    def _copies(self, item: Item, dims: Dims) -> list[Place]:
        """Where further copies are: on other tensor or expert ranks, and a tied embedding's on the last stage."""
        stage, ep, name = self._position(item, dims)
        ends = [(stage, name)]
        if item.weight.mcore == EMBEDDING and dims.tied and self._last.pp != stage.pp:
            ends.append((self._last, HEAD))
        every = [
            Place(Rank(tp, end.pp, at), end.vpp, end_name)
            for end, end_name in ends
            for at in (range(self.layout.ep) if ep is None else [ep])
            for tp in range(self.layout.tp)
        ]
        first = set(self._places(item, dims))
        return [place for place in every if place not in first]

    def _position(self, item: Item, dims: Dims) -> tuple[Stage, int | None, str]:
        """The stage of a weight, its expert rank where it has one, and its name in the modules there."""
        template, layer, expert = item.weight.mcore, item.at.layer, item.at.expert
        assert template is not None
        ep = None
        if expert is not None:
            experts = (dims.num_experts or 0) // self.layout.ep
            ep, expert = expert // experts, expert % experts
        if layer is not None:
            stage, layer = self._stage_of[layer]
        else:
            stage = Stage(0, 0) if template.startswith("embedding.") else self._last
        return stage, ep, spell(name_in_module(template, self.implementation, self.experts), Index(layer, expert))

    def _key(self, place: Place) -> str:
        file = self.files[place.rank]
        local = self._find(place)
        return f"{file.label(place.chunk)}{place.name if local is None else local.key}"

    def _find(self, place: Place) -> LocalTensor | None:
        return self.files[place.rank].chunks[place.chunk].get(place.name)

    def _rows(self, weight: Weight, places: list[Place]) -> int | None:
        """The rows of a vocabulary tensor with its padding: those that the ranks hold together."""
        local = self._find(places[0])
        return None if local is None or not local.view.shape else local.view.shape[0] * self.layout.tp

    def _slots(self, item: Item, place: Place, dims: Dims, rows: int | None, findings: Findings) -> list[Slot]:
        weight, _, state = item
        key, found = self._key(place), self._find(place)
        shape: Shape = dims.shape(weight.shape)
        if rows is not None and rows >= shape[0]:
            shape = (rows, *shape[1:])
        local = local_of(weight.shard, shape, self.layout.tp, place.rank.tp)
        if not findings.expect(key, None if found is None else found.meta, local.shape):
            return []
        assert found is not None
        view = found.view
        if state != PARAM:
            states = self._states[place.rank][place.chunk].get(place.name, {})
            if state in states:
                view = states[state]
            elif state != MASTER or view.dtype != "float32":  # a parameter in fp32 is its own master copy
                findings.missing.append(f"{key} ({state})")
                return []
        return slots_in_global(found.arrange(view), local)


def detect(path: Path) -> bool:
    """Whether a directory is one of these, or holds one."""
    return bool(_ranks_in(path)) or any(map(_ranks_in, _iterations(path)))


def _iterations(path: Path) -> list[Path]:
    return sorted(p for p in path.glob("*") if p.name == "release" or re.fullmatch(r"iter_\d+", p.name))


def _ranks_in(path: Path) -> list[Path]:
    return sorted(p for p in path.glob("mp_rank_*") if mp_rank_layout.RANK_NAME.fullmatch(p.name))


def resolve(path: Path) -> Path:
    """The directory of the rank files: `path`, or the one that its tracker file names.

    Raises:
        UnreadableCheckpoint: no tracker file, or it names a directory that is not there.
    """
    if _ranks_in(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        found = [str(p) for p in _iterations(path)]
        raise UnreadableCheckpoint(
            f"`{path}` has no tracker file `{TRACKER}`",
            items=found,
            hint=f"name the directory of one iteration: `{found[-1]}`" if found else "is this a Megatron checkpoint?",
        )
    said = tracker.read_text(errors="replace").strip()
    if said != "release" and not said.isdecimal():
        raise UnreadableCheckpoint(f"`{tracker}` says `{said[:40]}`, which is neither an iteration nor `release`")
    chosen = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not _ranks_in(chosen):
        raise UnreadableCheckpoint(f"`{tracker}` names `{chosen.name}`, which has no `mp_rank_*`")
    return chosen


def open_mp_rank(path: Path, args: Mapping[str, Any] | None = None) -> MpRankCheckpoint:
    """Open a directory: the pickles of its files, and none of their tensors.

    Args:
        args: Megatron arguments that take the place of stored ones, or of those that are not stored.

    Raises:
        UnreadableCheckpoint: a rank is missing or damaged, ranks are of different runs or iterations, their number
            fits no layout, or the run's arguments are not stored and not given.
    """
    path = resolve(path)
    where = f"`{path}`"
    folders = _ranks_in(path)
    trees = {folder.name: read_tree(_file_in(folder)) for folder in folders}
    stored = {name: args_of(tree) for name, tree in trees.items()}
    mp_rank_layout.check_agreement({name: each or {} for name, each in stored.items()}, where)
    given = {name: value for name, value in (args or {}).items() if value is not None}
    merged = {**(stored[folders[0].name] or {}), **given}
    layout = mp_rank_layout.layout_of(merged)
    mp_rank_layout.check_names(layout, trees, where)
    merged = _completed(merged, trees, layout, where)
    files = {}
    for rank in layout.ranks():
        name = mp_rank_layout.rank_name(rank, layout)
        file = path / name / MODEL_FILE
        chunks = chunks_of(trees[name], merged, f"`{file}`")
        rest = {key: value for key, value in trees[name].items() if not re.fullmatch(r"model\d*", key)}
        files[rank] = RankFile(name, file, rest, chunks)
    _refuse_different_iterations(files.values(), where)
    counts = _layers_of(files, layout, where)
    layout = mp_rank_layout.with_stages(layout, counts, merged, where)
    names = {name for file in files.values() for chunk in file.chunks for name in chunk}
    return MpRankCheckpoint(
        path,
        files,
        merged,
        layout,
        layout.stages(sum(counts.values())),
        TRANSFORMER_ENGINE if any("linear_qkv.layer_norm_weight" in name for name in names) else LOCAL,
        GROUPED if any(re.search(r"mlp\.experts\.linear_fc1\.weight\d+$", name) for name in names) else SEQUENTIAL,
    )


def _completed(
    args: dict[str, Any], trees: Mapping[str, Mapping[str, Any]], layout: Layout, where: str
) -> dict[str, Any]:
    """The arguments with what an old run did not store."""
    names = [mp_rank_layout.rank_name(Rank(pp=pp), layout) for pp in range(layout.pp)]
    stages = [models_of(trees[name], f"`{name}` of {where}") for name in names]
    in_order = [models[chunk] for chunk in range(len(stages[0])) for models in stages if chunk < len(models)]
    if any(map(old_classes.is_old, in_order)):
        if "args" in trees[names[0]]:
            return old_classes.behaved(args)
        return {**args, **old_classes.arguments_from(in_order, args, tp=layout.tp)}
    if not args.get("num_layers") and not args.get("encoder_num_layers"):
        raise UnreadableCheckpoint(
            f"{where} does not store the arguments of its run", hint="was it written by Megatron-LM?"
        )
    return args


def _file_in(folder: Path) -> Path:
    file = folder / MODEL_FILE
    if not file.is_file() and (folder / "model_rng.pt").is_file():
        raise UnreadableCheckpoint(
            f"`{folder}` has `model_rng.pt`, as Megatron-LM wrote it with its distributed optimizer until May 2023",
            hint="this form is not read: load and save it once with a version that can",
        )
    return file


def _refuse_different_iterations(files: Iterable[RankFile], where: str) -> None:
    found: dict[Any, list[str]] = {}
    for file in files:
        found.setdefault((file.iteration, file.tree.get("checkpoint_version")), []).append(file.name)
    if len(found) > 1:
        raise UnreadableCheckpoint(
            f"the ranks of {where} are of different iterations",
            items=[
                f"iteration {iteration}, checkpoint version {version}: {', '.join(names)}"
                for (iteration, version), names in found.items()
            ],
        )


def _layers_of(files: Mapping[Rank, RankFile], layout: Layout, where: str) -> dict[Stage, int]:
    """How many layers each stage holds, from the files."""
    numbers = {file.name: len(file.chunks) for file in files.values()}
    if len(set(numbers.values())) > 1:
        raise UnreadableCheckpoint(
            f"the ranks of {where} do not hold equally many model chunks",
            items=[f"{name}: {count}" for name, count in numbers.items()],
        )
    counts: dict[Stage, int] = {}
    for rank, file in files.items():
        for number, chunk in enumerate(file.chunks):
            count = num_layers_of(chunk, f"`{file.name}`")
            before = counts.setdefault(Stage(number, rank.pp), count)
            if before != count:
                raise UnreadableCheckpoint(f"ranks of one stage of {where} hold {before} and {count} layers")
    return counts
