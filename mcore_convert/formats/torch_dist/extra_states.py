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
    for weight, at, state in items:
        if weight.mcore is None or state != PARAM:
            continue
        module = weight.mcore.rpartition(".")[0]
        last = module.rpartition(".")[2]
        modules = [module] if has_extra_state(last, norms=True) else []
        if weight.mcore == HYBRID_FINAL_NORM:
            modules.append(OUTPUT.removesuffix(".weight"))
        if last == "linear_proj":
            modules.append(f"{module.rpartition('.')[0]}.core_attention")
        for each in modules:
            axes = axes_written(each, dims)
            place = [getattr(at, axis) for axis in axes] or [0]
            shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, sizes_of(axes, dims) or (1,)))}"
            keys[f"{spell(drop(each, *axes), at)}._extra_state/{shard}"] = None
    return keys
