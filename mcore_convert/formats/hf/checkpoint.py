"""Format `hf`: a Hugging Face model directory, with safetensors or pickled weights, in one file or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_convert.errors import ConfigError, MappingError, UnreadableCheckpoint, fold
from mcore_convert.formats.base import Side
from mcore_convert.formats.files import safetensors as safetensors_file
from mcore_convert.formats.files.json_file import json_bytes, read_json
from mcore_convert.formats.files.model_folder import ADAPTER, CONFIG, INDEX
from mcore_convert.formats.files.sharing import refuse_shared
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.hf.encodings import encoding
from mcore_convert.formats.hf.names import HfNames
from mcore_convert.formats.hf.quantised import KEY, read_quantised
from mcore_convert.formats.request import Request, Reservation
from mcore_convert.formats.traits import Storage
from mcore_convert.spec.family import Family, Item
from mcore_convert.spec.names import spell
from mcore_convert.spec.pack import packed
from mcore_convert.spec.shard import Box
from mcore_convert.storage.codecs import Quantised
from mcore_convert.storage.sources import expect_headers
from mcore_convert.storage.views import Slot, Sum, TensorMeta, View, common_meta, is_inside

DEFAULT_SHARD_SIZE = 5_000_000_000
MAX_FILES = 100_000  # in an index

# In transformers' order of preference.
WEIGHT_FILES = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def detect(path: Path) -> bool:
    """Return whether a directory is a Hugging Face model."""
    return path.is_dir() and any((path / name).is_file() for name in WEIGHT_FILES)


def directory_of(file: Path) -> Path | None:
    """Return the directory of a file of weights; None for any other path.

    Raises:
        UnreadableCheckpoint: the directory is read from other files.
    """
    if file.suffix not in (".safetensors", ".bin") or not file.is_file():
        return None
    folder = file.parent
    chosen = next((name for name in WEIGHT_FILES if (folder / name).is_file()), file.name)
    weight_map = read_json(folder / chosen).get("weight_map") if chosen.endswith(".json") else None
    if file.name != chosen and not (isinstance(weight_map, dict) and file.name in weight_map.values()):
        raise UnreadableCheckpoint(f"`{file}` is not what a model in its directory is read from: that is `{chosen}`")
    return folder


@dataclass(frozen=True)
class HfOptions:
    """Options of a target: `max_shard_size` is the largest size of a file, in bytes.

    A larger tensor gets a file of its own. `quantize` is one of ENCODINGS.
    """

    max_shard_size: int = DEFAULT_SHARD_SIZE
    quantize: str | None = None


@dataclass(frozen=True)
class HfCheckpoint(HfNames):
    """An open or a reserved directory. `prefix` may be absent from names (`transformer.` in GPT-2's).

    `sums` are the checksums in files of `torch.save`; safetensors has none. If some tensors are `quantised`, `stored`
    are the tensors in files, `views` the decoded tensors, and `config` the configuration of the decoded model.
    """

    views: Mapping[str, View]
    config: Mapping[str, Any]
    sums: tuple[Sum, ...] = ()
    prefix: str = ""
    stored: Mapping[str, View] | None = None
    quantised: Quantised | None = None
    undecoded: tuple[str, ...] = ()
    format: str = "hf"
    side: Side = Side.HUGGING_FACE

    @cached_property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return {name: view.meta for name, view in self.views.items()}

    @cached_property
    def headers(self) -> Mapping[str, TensorMeta]:
        return {name: view.meta for name, view in self.whole_views.items()}

    @property
    def original_config(self) -> Mapping[str, Any]:
        return self.config

    @property
    def companions(self) -> Path:
        return self.path

    @property
    def whole_views(self) -> Mapping[str, View]:
        return self.views if self.stored is None else self.stored

    @property
    def coded_views(self) -> Mapping[str, View]:
        return {name: view for name, view in self.views.items() if view.coded is not None}

    def storage(self) -> Storage:
        return Storage(len({view.path for view in self.whole_views.values()}))

    def remarks(self) -> list[str]:
        notes = [] if self.quantised is None else [f"decoded to {self.quantised.dtype}: {self.quantised}"]
        if (self.path / ADAPTER).is_file():  # with peft installed, transformers adds it to the weights
            notes.append(f"`{ADAPTER}` lies beside the model: weights are taken as they are, without the adapter")
        return notes

    def named_for(self, family: Family) -> HfCheckpoint:
        return replace(self, prefix=family.optional_prefix)

    def meta_of(self, name: str) -> TensorMeta | None:
        """Return the shape and the dtype of a tensor; None if there is none of this name."""
        return self.tensors.get(name)

    def parts_of(self, name: str) -> list[Slot]:
        """Return the parts of a tensor in files."""
        view = self.views[name]
        return [Slot(view, Box.whole(view.shape))]


def open_hf(path: Path, args: Mapping[str, Any] | None = None) -> HfCheckpoint:
    """Open a directory: its configuration and the headers of its weight files.

    Args:
        args: Megatron arguments, which are ignored.

    Raises:
        UnreadableCheckpoint: a file is missing or damaged, or the index and the files disagree.
    """
    config = read_json(path / CONFIG)
    file = next((name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if file is None:
        raise UnreadableCheckpoint(f"`{path}` has no weights", hint=f"one of {', '.join(WEIGHT_FILES)} should be there")
    if file.endswith(".json"):
        views, sums = _read_indexed(path, file)
    else:
        views, sums = _read_file(path / file)
    read = read_quantised(views, config)
    if read.quantised is not None:
        config = {key: value for key, value in config.items() if key != KEY}
    return HfCheckpoint(path, read.views, config, sums, stored=views, quantised=read.quantised, undecoded=read.problems)


def _read_indexed(path: Path, index: str) -> tuple[dict[str, View], tuple[Sum, ...]]:
    """Return the tensors of a sharded directory; the index must name exactly those in the files."""
    weight_map = read_json(path / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UnreadableCheckpoint(f"`{path / index}` has no `weight_map` from tensors to files")
    files = sorted(set(weight_map.values()))
    outside = [file for file in files if not is_inside(file)]
    if outside:
        raise UnreadableCheckpoint(f"`{path / index}` names files outside of its directory", items=outside)
    if len(files) > MAX_FILES:
        raise UnreadableCheckpoint(f"`{path / index}` names {len(files):,} files, and at most {MAX_FILES:,} can be")
    absent = [file for file in files if not (path / file).is_file()]
    if absent:
        raise UnreadableCheckpoint(f"`{path / index}` names files that are not there", items=absent)
    expect_headers(path / file for file in files)
    read = {file: _read_file(path / file) for file in files}
    by_file = {file: views for file, (views, _) in read.items()}
    absent = [name for name, file in weight_map.items() if name not in by_file[file]]
    if absent:
        raise UnreadableCheckpoint(f"`{path / index}` names tensors that its files do not hold", items=fold(absent))
    if len(weight_map) < sum(map(len, by_file.values())):
        extra = [name for file, views in by_file.items() for name in views if weight_map.get(name) != file]
        raise UnreadableCheckpoint(f"`{path / index}` does not name tensors that its files hold", items=fold(extra))
    views = {name: by_file[file][name] for name, file in weight_map.items()}
    return views, tuple(each for _, sums in read.values() for each in sums)


def _read_file(path: Path) -> tuple[dict[str, View], tuple[Sum, ...]]:
    """Read the header of a file: its tensors by name, and their stored checksums."""
    if path.suffix == ".safetensors":
        return safetensors_file.read(path), ()
    archive = TorchFile(path)
    if not isinstance(archive.tree, dict):
        raise UnreadableCheckpoint(f"`{path}` does not hold a state dict")
    views = {str(name): view for name, view in archive.tree.items() if isinstance(view, View)}
    refuse_shared(path, views)
    return views, archive.sums


def reserve(request: Request) -> tuple[HfCheckpoint, Reservation]:
    """Lay out a directory: the file and offset of each tensor, in the order of the forward pass.

    Raises:
        MappingError: two weights have one name.
        ConfigError: the form to quantise to is unknown, or fits none of the weights.
    """
    path, family, dims = request.path, request.family, request.dims
    wanted = request.options.quantize
    chosen = None if wanted is None else encoding(wanted)
    groups: list[dict[str, TensorMeta]] = []  # tensors that must be in the same file
    names: set[str] = set()
    coded: dict[str, TensorMeta] = {}
    for (weight, at, state), dtype in request.dtype_of.items():
        pack, whole = weight.pack, family.shape(weight, dims)
        shapes, pieces = packed(pack, whole, dims)
        turned = {piece.tensor for piece in pieces if piece.transposed} if chosen else set()
        for number, (template, shape) in enumerate(zip(weight.hf, shapes, strict=True)):
            name = spell(template, at)
            if weight.is_joined(template):
                shape = (dims.num_experts or 0, *shape)
                if at.expert:  # in the tensor that the first expert has reserved
                    if dtype != request.dtype_of[Item(weight, at._replace(expert=0), state)]:
                        raise MappingError(f"`{name}` would have experts in {dtype} and in another dtype")
                    continue
            if name in names:
                raise MappingError(f"two weights of family `{family.name}` are called `{name}`")
            if chosen is not None and chosen.takes(weight, name, shape, turned=number in turned):
                coded[name] = common_meta(shape, dtype)
                groups.append(chosen.stored(name, coded[name]))
            else:
                groups.append({name: common_meta(shape, dtype)})
            names.update(groups[-1], (name,))
    reservation = Reservation(path)
    stored = _lay_out(reservation, path, groups, request.options.max_shard_size)
    if chosen is None:
        reservation.texts[path / CONFIG] = json_bytes(request.config)
        return HfCheckpoint(path, stored, request.config), reservation
    if not coded:
        raise ConfigError(f"no weight of this model can be quantised to `{wanted}`", hint=chosen.fitting)
    views, quantised = chosen.views(stored, coded)
    left = [name.removesuffix(".weight") for name in views if name not in coded and name.endswith(".weight")]
    reservation.literals += [
        (stored[name].path, stored[name].offset, content)
        for each, meta in coded.items()
        for name, content in chosen.literals(each, meta.shape).items()
    ]
    reservation.texts[path / CONFIG] = json_bytes({**request.config, KEY: chosen.settings(left)})
    return HfCheckpoint(path, views, request.config, stored=stored, quantised=quantised), reservation


def _lay_out(
    reservation: Reservation, path: Path, groups: Sequence[Mapping[str, TensorMeta]], limit: int
) -> dict[str, View]:
    """Reserve the files of tensors, with an index if there are several, and return the view of each tensor."""
    shards = list(_shards(groups, limit))
    metas = {name: meta for shard in shards for name, meta in shard.items()}
    views: dict[str, View] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = path / name
        head, starts = safetensors_file.header_bytes(shard)
        reservation.sizes[file] = len(head) + _total(shard.values())[0]
        reservation.literals.append((file, 0, head))
        for tensor, meta in shard.items():
            views[tensor] = View.of(file, starts[tensor], meta)
            weight_map[tensor] = name
    if len(shards) > 1:
        total = dict(zip(("total_size", "total_parameters"), _total(metas.values()), strict=True))
        reservation.texts[path / INDEX] = json_bytes({"metadata": total, "weight_map": weight_map})
    return views


def _total(metas: Iterable[TensorMeta]) -> tuple[int, int]:
    """Return the total bytes and elements of all tensors; equal ones are counted first."""
    alike = Counter(metas).items()
    return sum(meta.nbytes * count for meta, count in alike), sum(meta.numel * count for meta, count in alike)


def _shards(groups: Iterable[Mapping[str, TensorMeta]], limit: int) -> Iterable[dict[str, TensorMeta]]:
    """Yield the tensors of each file; a group is not split."""
    shard: dict[str, TensorMeta] = {}
    size = 0
    for group in groups:
        nbytes = sum(meta.nbytes for meta in group.values())
        if shard and size + nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard |= group
        size += nbytes
    yield shard
