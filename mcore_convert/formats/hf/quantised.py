"""The `quantization_config` of a model, and the decoded tensors that its stored tensors represent.

Names identify quantised tensors: a tensor with a scale beside it holds codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mcore_convert.errors import fold
from mcore_convert.formats.hf.forms import Form, Misfit
from mcore_convert.formats.hf.schemes import METHODS, Problems, Values
from mcore_convert.spec.config.mapping import shown
from mcore_convert.storage.codecs import Blocks, Quantised
from mcore_convert.storage.views import View, bytes_of

KEY = "quantization_config"
DTYPES = ("bfloat16", "float16", "float32")  # compute dtypes of quantised models


@dataclass(frozen=True)
class Reading:
    """The tensors of a model, some of them decoded. `problems` has the reasons why none is, one line each."""

    views: Mapping[str, View]
    quantised: Quantised | None = None
    problems: tuple[str, ...] = ()


def read_quantised(stored: Mapping[str, View], config: Values) -> Reading:
    """Return the tensors that stored ones represent according to `config.json`. Reads only headers and a few shapes."""
    scheme = config.get(KEY)
    if scheme is None:
        return Reading(stored)
    if not isinstance(scheme, dict):
        return Reading(stored, problems=(f"`{KEY}` = {shown(scheme)} is no table",))
    method = scheme.get("quant_method")
    reader = METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        return Reading(stored, problems=(f"`quant_method` = {shown(method)} is none of {', '.join(METHODS)}",))
    problems = Problems()
    forms = list(reader(scheme, problems))
    if problems.lines:
        return Reading(stored, problems=tuple(problems.lines))
    dtype = next((config[key] for key in ("dtype", "torch_dtype") if config.get(key) in DTYPES), DTYPES[0])
    coded = _bound(stored, forms, problems)
    if problems.lines:
        return Reading(stored, problems=tuple(fold(problems.lines)))
    hidden = {name for each, _ in coded.values() for name in each.names}
    views: dict[str, View] = {}
    by_first = {each.names[0]: name for name, (each, _) in coded.items()}
    for name, view in stored.items():
        if name in by_first:
            each, form = coded[by_first[name]]
            whole = View.decoded(each, dtype)
            views[by_first[name]] = _turned(whole) if form.transposed else whole
        elif name not in hidden:
            views[name] = view
    if not coded:
        return Reading(views)
    texts = dict.fromkeys(form.text for _, form in coded.values())
    nbytes, decoded = bytes_of(map(stored.__getitem__, hidden)), bytes_of(map(views.__getitem__, coded))
    return Reading(views, Quantised(str(method), tuple(texts), len(coded), nbytes, decoded, dtype))


def _bound(stored: Mapping[str, View], forms: Iterable[Form], problems: Problems) -> dict[str, tuple[Blocks, Form]]:
    """Return the coded tensors by their decoded names."""
    coded: dict[str, tuple[Blocks, Form]] = {}
    wrong: dict[str, str] = {}
    for form in forms:
        ends = (*form.stored, *form.may)
        codes, scales = form.stored[:2]
        for name in [name for name in stored if name.endswith(scales)]:
            base = name.removesuffix(scales)
            if base + codes not in stored:
                continue
            names = tuple([each for end in ends if (each := base + end) in stored])
            absent = [base + end for end in form.stored if base + end not in names] if len(names) < len(ends) else []
            own = base + form.name
            try:
                if absent:
                    raise Misfit(f"lacks {', '.join(absent)}")
                blocks = form.bind(names, tuple([stored[each] for each in names]))
            except Misfit as misfit:
                wrong.setdefault(own, str(misfit))
                continue
            if own in coded and coded[own][0] != blocks:
                wrong[own] = f"may be {coded[own][1].text} or {form.text}"
            coded[own] = (blocks, form)
    problems.lines += [f"{name}: {why}" for name, why in wrong.items() if name not in coded or why.startswith("may")]
    return coded


def _turned(view: View) -> View:
    """Return the view with its last two dimensions swapped."""
    shape, strides = view.shape, view.strides
    return view._replace(shape=(*shape[:-2], shape[-1], shape[-2]), strides=(*strides[:-2], strides[-1], strides[-2]))
