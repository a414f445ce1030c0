"""Megatron's `--pipeline-model-parallel-layout`: a letter for each layer, and `|` between stages (`Ettt|(tt|)*2tL`).

Facts are from Megatron Core 0.16 to 0.19 (`pipeline_parallel_layer_layout.py`, `validate_layer_layout`; for virtual
stages without pipeline parallelism `parallel_state.py`).
"""

from __future__ import annotations

import re

from mcore_convert.errors import LayoutError

EMBEDDING, LAYER, MTP, LOSS, BORDER = "E", "t", "m", "L", "|"
LONGEST = 100_000  # letters of a layout; one that a checkpoint stores may be a stranger's


def stages_of(text: str) -> list[str]:
    """Return the stages of a layout, repetitions written out: `Et*2|(t|)*2L` is `Ett`, `t`, `t`, `L`.

    Raises:
        LayoutError: it has other letters, or too many.
    """
    text, given = text.replace(",", ""), text
    room = LONGEST - len(text)

    def repeated(matched: re.Match[str]) -> str:
        nonlocal room
        letters, digits = matched[1], matched[2]
        room -= len(letters) * int(digits[: len(str(LONGEST)) + 1])
        if room < 0:
            raise LayoutError(f"the pipeline layout `{given[:80]}` has more than {LONGEST:,} letters")
        return letters * int(digits)

    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, repeated, text)
    unknown = sorted(set(text) - {EMBEDDING, LAYER, MTP, LOSS, BORDER})
    if unknown:
        raise LayoutError(f"the pipeline layout `{given[:80]}` has unknown letters: {' '.join(unknown)[:80]}")
    return text.split(BORDER)


def problems_of(text: str, pp: int, mtp_num_layers: int) -> list[str]:
    """Return why Megatron Core refuses a layout for so many pipeline ranks, a line each."""
    stages = stages_of(text)
    letters, named = "".join(stages), f"the pipeline layout `{text}`"
    problems = []
    if pp == 1 and len(stages) > 1:
        problems.append(f"{named} has {len(stages)} stages, and virtual ones need a pp above 1")
    if not letters.startswith(EMBEDDING) or letters.count(EMBEDDING) != 1:
        problems.append(f"{named} does not begin with its one `{EMBEDDING}`, the embedding")
    if not letters.endswith(LOSS) or letters.count(LOSS) != 1:
        problems.append(f"{named} does not end with its one `{LOSS}`, the loss")
    counts = [stage.count(MTP) for stage in stages]
    if sum(counts) != mtp_num_layers or (mtp_num_layers and max(counts) != mtp_num_layers):
        wanted = f"`{MTP}` {mtp_num_layers} times in one stage" if mtp_num_layers else f"no `{MTP}`"
        problems.append(f"`mtp_num_layers` = {mtp_num_layers} needs {wanted} of {named}")
    elif mtp_num_layers and (LAYER in letters.partition(MTP)[2] or any(counts[:-pp])):
        problems.append(f"{named} has `{MTP}` before a `{LAYER}`, or not in the last virtual stage of a rank")
    return problems
