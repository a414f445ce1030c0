"""The leading axes of written keys, and the objects that modules of Transformer Engine require."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_convert.formats.megatron.modules import has_extra_state
from mcore_convert.formats.torch_dist.keys import axes_of
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.family import Item
from mcore_convert.spec.gpt import HYBRID_FINAL_NORM, OUTPUT
from mcore_convert.spec.names import PARAM, drop, spell
from mcore_convert.spec.shard import Shape


def axes_written(template: str, dims: Dims) -> tuple[str, ...]:
    """Return the placeholders of a name that are leading axes in written checkpoints."""
    return axes_of(template, "stacked" if dims.stacked else "per_layer")


def sizes_of(axes: tuple[str, ...], dims: Dims) -> Shape:
    """Return the sizes of the leading axes of a key: the numbers of layers and experts."""
    leading = {"layer": dims.num_layers, "expert": dims.num_experts or 0}
    return tuple(leading[axis] for axis in axes)


def extra_state_keys(items: Iterable[Item], dims: Dims) -> Iterable[str]:
    """Return the `_extra_state` objects that any Megatron version or Transformer Engine requires; others ignore them.

    Every linear layer and every norm that is a separate module has one, and attention itself until 0.14. A hybrid also
    requires that of the output layer, which a `GPTModel` omits (`gpt_model.py`, `sharded_state_dict`).
    """
    keys: dict[str, None] = {}
    known: dict[str, list[tuple[str, tuple[str, ...], str]]] = {}  # results that layers and experts share
    for weight, at, state in items:
        if weight.mcore is None or state != PARAM:
            continue
        if weight.mcore not in known:
            known[weight.mcore] = [_shared(module, dims) for module in _modules(weight.mcore)]
        for template, axes, sizes in known[weight.mcore]:
            place = ".".join([str(getattr(at, axis)) for axis in axes]) or "0"
            keys[f"{spell(template, at)}._extra_state/shard_{place}_{sizes}"] = None
    return keys


def _modules(name: str) -> list[str]:
    """Return the modules with such an object that follow from a weight's name."""
    module = name.rpartition(".")[0]
    last = module.rpartition(".")[2]
    modules = [module] if has_extra_state(last, norms=True) else []
    if name == HYBRID_FINAL_NORM:
        modules.append(OUTPUT.removesuffix(".weight"))
    if last == "linear_proj":
        modules.append(f"{module.rpartition('.')[0]}.core_attention")
    return modules


def _shared(module: str, dims: Dims) -> tuple[str, tuple[str, ...], str]:
    """Return the template of a module's key, its leading axes, and their sizes."""
    axes = axes_written(module, dims)
    return drop(module, *axes), axes, ".".join(map(str, sizes_of(axes, dims) or (1,)))
