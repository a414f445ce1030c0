"""`python -m tests.fuzz`: all fuzzers in turn for a time, and a table of what they did; ends with 1 after a find.

Each target begins at its corpus, changed by a seed; where atheris is installed, `--guided TARGET` hands one target to
it, and it is then coverage that says which change is followed up.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.checkpoints import COMMANDS, GOOD, Subject, alarm
from tests.fuzz.interruptions import Interruptions
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS, attempt, scratch, seeds_of

MEMORY = 2**30  # bytes, beyond which a fuzzer has found something
NAMES = [*TARGETS, *COMMANDS, *Interruptions.names]
TURN = 500  # executions of a target, or a tenth of that in cases of a checkpoint, in one process


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**40, help="of the first case")
    parser.add_argument("--only", nargs="*", choices=NAMES, help="these alone")
    parser.add_argument("--finds", type=Path, default=Path(tempfile.gettempdir()) / "mcore-convert-finds")
    parser.add_argument("--guided", choices=TARGETS, help="hand this target to atheris, with the arguments that follow")
    chosen, rest = parser.parse_known_args()
    if chosen.guided:
        guided(chosen.guided, rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    chosen.finds.mkdir(parents=True, exist_ok=True)
    names = chosen.only or NAMES
    subjects: dict[str, Subject | Interruptions] = {
        name: Subject(name) if name in COMMANDS else Interruptions(name) for name in names if name not in TARGETS
    }
    counts: dict[str, Counter[str]] = collections.defaultdict(Counter)
    end, seed = time.monotonic() + 60 * chosen.minutes, chosen.seed
    try:
        while time.monotonic() < end:
            for name in names:
                count = TURN if name in TARGETS else TURN // 10
                counts[name] += in_process(name, subjects.get(name), range(seed, seed + count), chosen.finds)
            seed += TURN
    except KeyboardInterrupt:
        pass
    bad = 0
    for name, kinds in counts.items():
        bad += sum(count for kind, count in kinds.items() if kind not in (*GOOD, "taken"))
        sys.stdout.write(
            f"{name:20} {sum(kinds.values()):>9,}  {', '.join(f'{kind} {n:,}' for kind, n in kinds.most_common())}\n"
        )
    sys.stdout.write(f"seeds {chosen.seed} to {seed}{f'; finds are in {chosen.finds}' if bad else ''}\n")
    return min(bad, 1)


def in_process(name: str, subject: Subject | Interruptions | None, seeds: range, finds: Path) -> Counter[str]:
    """What became of these cases, in a process that may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.enable()
        with os.fdopen(writing, "w", buffering=1) as told:
            for seed in seeds:
                told.write(f"{seed} ")
                told.write(f"{one(name, subject, seed, finds)}\n")
        scratch().remove()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = [line.split(" ", 1) for line in told]
    _, status = os.waitpid(child, 0)
    kinds = Counter(line[1].strip() for line in lines if len(line) == 2 and line[1].strip())
    if status:
        kinds["crash"] += 1
        note(finds, name, lines[-1][0] if lines else "?", f"the process ended with status {status}")
    return kinds


def one(name: str, subject: Subject | Interruptions | None, seed: int, finds: Path) -> str:
    """The class of one case; what is no good one is written down."""
    if subject is not None:
        case = subject.case(seed)
        kind, what = case.kind, f"{case.what}\n{case.said}"
    else:
        data, kind, what = case_of(name, seed), "taken", ""
        try:
            with alarm():
                kind = "taken" if attempt(name, data) else "refused"
        except BaseException:
            kind, what = traceback.format_exc().splitlines()[-1].split(":")[0], traceback.format_exc()
    if kind not in (*GOOD, "taken"):
        note(finds, name, str(seed), f"{kind}\n{what}")
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MEMORY:
        note(finds, name, str(seed), "memory")
        os._exit(9)  # the peak of this process would be taken for that of every later case
    return kind


def case_of(name: str, seed: int) -> bytes:
    """What a target is given for a seed."""
    rng, seeds = random.Random(f"{name} {seed}"), seeds_of(name)
    return mutated(rng.choice(seeds), seeds, rng)


def note(finds: Path, name: str, seed: str, what: str) -> None:
    """Write a find down; `tests.fuzz.__main__.one(name, ...)` repeats it."""
    (finds / f"{name}-{seed}.txt").write_text(what, errors="backslashreplace")


def guided(name: str, arguments: list[str]) -> None:
    """Give one target to atheris, which does not return."""
    import atheris

    folder = scratch().path / "seeds"
    folder.mkdir()
    for number, seed in enumerate(seeds_of(name)):
        (folder / str(number)).write_bytes(seed)
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments, str(folder)], lambda data: attempt(name, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
