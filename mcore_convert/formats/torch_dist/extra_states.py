"""The leading axes of the keys that are written, and the objects that modules of Transformer Engine ask for."""

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
    """Return the placeholders of a name that are leading axes in what is written."""
    return axes_of(template, "stacked" if dims.stacked else "per_layer")


def sizes_of(axes: tuple[str, ...], dims: Dims) -> Shape:
    """Return how many layers and experts there are along the leading axes of a key."""
    leading = {"layer": dims.num_layers, "expert": dims.num_experts or 0}
    return tuple(leading[axis] for axis in axes)


def extra_state_keys(items: Iterable[Item], dims: Dims) -> Iterable[str]:
    """Return the `_extra_state` objects that some Megatron version or Transformer Engine asks for; others ignore them.

    Every linear layer and every norm that is a module of its own has one, and attention itself until 0.14. A hybrid
    asks for that of the output layer, too, which a `GPTModel` leaves out (`gpt_model.py`, `sharded_state_dict`).
    """
    keys: dict[str, None] = {}
    known: dict[str, list[tuple[str, tuple[str, ...], str]]] = {}  # of the weights: what layers and experts share
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
    """Return the modules that have such an object, of those that a weight stands for."""
    module = name.rpartition(".")[0]
    last = module.rpartition(".")[2]
    modules = [module] if has_extra_state(last, norms=True) else []
    if name == HYBRID_FINAL_NORM:
        modules.append(OUTPUT.removesuffix(".weight"))
    if last == "linear_proj":
        modules.append(f"{module.rpartition('.')[0]}.core_attention")
    return modules


def _shared(module: str, dims: Dims) -> tuple[str, tuple[str, ...], str]:
    """Return the template of a module's key, its leading axes, and how many there are along these."""
    axes = axes_written(module, dims)
    return drop(module, *axes), axes, ".".join(map(str, sizes_of(axes, dims) or (1,)))
