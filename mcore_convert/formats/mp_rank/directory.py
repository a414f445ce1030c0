"""Format `torch`: Megatron-LM's older checkpoints, one file per rank that holds its own part of the model.

    latest_checkpointed_iteration.txt
    iter_0000010/mp_rank_01_000/model_optim_rng.pt     tensor rank 1, pipeline rank 0 (`_EEE`: expert rank)
    iter_0000010/mp_rank_01_000/distrib_optim.pt       with the distributed optimizer

A file holds the rank's own modules: layers and experts are numbered from 0 on each rank, a gated `linear_fc1` is
`[gate_r; up_r]`, and replicated weights are in every file (Megatron-LM, `megatron/training/checkpointing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.megatron.modules import (
    DOWN_PROJECTIONS,
    FINAL_NORMS,
    experts_in,
    implementation_in,
)
from mcore_convert.formats.megatron.recorded import beside
from mcore_convert.formats.megatron.run_directory import resolve
from mcore_convert.formats.mp_rank import layout as mp_rank_layout
from mcore_convert.formats.mp_rank import old_classes
from mcore_convert.formats.mp_rank.checkpoint import MpRankCheckpoint
from mcore_convert.formats.mp_rank.rank_file import (
    MODEL_FILE,
    RankFile,
    args_of,
    chunks_of,
    models_of,
    num_layers_of,
    read_archive,
)
from mcore_convert.spec.layout import Layout, Rank, Stage
from mcore_convert.spec.releases import NEWEST, OLDEST, Release
from mcore_convert.storage.sources import expect_headers

NORM_STATES = {f"{norm}._extra_state" for norm in FINAL_NORMS}

__all__ = ["MpRankCheckpoint", "detect", "open_mp_rank"]


def detect(path: Path) -> bool:
    """Return whether a path is a directory with folders of ranks, the folder of one rank, or the file of one rank."""
    return _stands_alone(path) or bool(_ranks_in(path))


def directory_of(path: Path) -> Path | None:
    """Return the directory of rank files for one rank's folder or file; None for any other path.

    A folder or a file of another name is a complete checkpoint of one rank, as such checkpoints are shared.
    """
    folder = path.parent if path.name == MODEL_FILE and path.is_file() else path
    rank = folder if folder.name else folder.resolve()
    if mp_rank_layout.RANK_NAME.fullmatch(rank.name) is None:
        return None if folder == path else folder
    return rank.parent if rank.parent.name else rank.absolute().parent


def _stands_alone(path: Path) -> bool:
    return (path / MODEL_FILE).is_file() or (path.suffix == ".pt" and path.is_file())


def _files_of(path: Path) -> dict[str, Path]:
    """Return the file of each rank by the name of its folder; a single file is the first rank's."""
    if _stands_alone(path):
        return {mp_rank_layout.rank_name(Rank(), Layout()): path / MODEL_FILE if path.is_dir() else path}
    return {folder.name: _file_in(folder) for folder in _ranks_in(path)}


def _ranks_in(path: Path) -> list[Path]:
    return sorted(p for p in path.glob("mp_rank_*") if mp_rank_layout.RANK_NAME.fullmatch(p.name))


def open_mp_rank(path: Path, args: Mapping[str, Any] | None = None) -> MpRankCheckpoint:
    """Open a directory: reads the pickles of its files, but no tensors.

    Args:
        args: Megatron arguments that override or complete the stored ones.

    Raises:
        UnreadableCheckpoint: a rank is missing or damaged, ranks belong to different runs or iterations, their number
            fits no layout, or the run's arguments are neither stored nor given.
    """
    path = path if _stands_alone(path) else resolve(path, _ranks_in, "mp_rank_*")
    where = f"`{path}`"
    paths = _files_of(path)
    first = next(iter(paths))
    expect_headers(paths.values())
    archives = {name: read_archive(file) for name, file in paths.items()}
    trees: dict[str, dict[str, Any]] = {name: archive.tree for name, archive in archives.items()}
    stored = {name: args_of(tree) for name, tree in trees.items()}
    mp_rank_layout.check_agreement({name: each or {} for name, each in stored.items()}, where)
    given = {name: value for name, value in (args or {}).items() if value is not None}
    around = beside(path) if stored[first] is None else None
    recorded = None if around is None else around.read()
    merged = {**(stored[first] or ({} if recorded is None else recorded.args)), **given}
    layout = mp_rank_layout.layout_of(merged)
    if stored[first] is None and layout == Layout() and len(paths) > 1:
        raise UnreadableCheckpoint(
            f"{where} has {len(paths)} ranks and does not store the arguments of its run",
            items=[*paths],
            hint="give the layout that it was saved at as options, and the sizes of its model that shapes do not tell",
        )
    mp_rank_layout.check_names(layout, trees, where)
    mp_rank_layout.check_order({name: each or {} for name, each in stored.items()}, layout, where)
    merged = _completed(merged, trees, layout, where)
    files = {}
    norm_state = False
    for rank in layout.ranks():
        name = mp_rank_layout.rank_name(rank, layout)
        file = paths[name]
        chunks = chunks_of(trees[name], merged, f"`{file}`")
        norm_state |= any(not NORM_STATES.isdisjoint(model) for model in models_of(trees[name], f"`{file}`"))
        rest = {key: value for key, value in trees[name].items() if not re.fullmatch(r"model\d*", key)}
        files[rank] = RankFile(name, file, rest, chunks, model_sums=archives[name].sums)
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
        implementation_in(names, merged),
        experts_in(names),
        norm_state,
        _release_of(files.values(), merged),
    )


def _release_of(files: Iterable[RankFile], args: Mapping[str, Any]) -> Release:
    """Return a release whose modules shard the matrices of latent attention as these files do."""
    rank, rotary = args.get("kv_lora_rank"), args.get("qk_pos_emb_head_dim")
    if not isinstance(rank, int) or not isinstance(rotary, int):
        return NEWEST
    for file in files:
        for chunk in file.chunks:
            for name, local in chunk.items():
                if name.endswith(DOWN_PROJECTIONS[1]):
                    return NEWEST if local.view.shape[:1] == (rank + rotary,) else OLDEST
    return NEWEST


def _completed(
    args: dict[str, Any], trees: Mapping[str, Mapping[str, Any]], layout: Layout, where: str
) -> dict[str, Any]:
    """Return the arguments, completed by those that an old run did not store."""
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
    files_of: dict[Any, list[str]] = {}
    for file in files:
        files_of.setdefault((file.iteration, file.tree.get("checkpoint_version")), []).append(file.name)
    if len(files_of) > 1:
        raise UnreadableCheckpoint(
            f"the ranks of {where} are of different iterations",
            items=[
                f"iteration {iteration}, checkpoint version {version}: {', '.join(names)}"
                for (iteration, version), names in files_of.items()
            ],
        )


def _layers_of(files: Mapping[Rank, RankFile], layout: Layout, where: str) -> dict[Stage, int]:
    """Return the number of layers of each stage, from the files."""
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
