"""`python -m tests.fuzz`: all fuzzers in turn for a time, and a table of what they did; ends with 1 after a find.

Each target begins at its corpus, changed by a seed; where atheris is installed, `--guided TARGET` hands one target to
it, and it is then coverage that says which change is followed up.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType

from tests.fuzz.checkpoints import BLOCKED, COMMANDS, GOOD, Subject, alarm
from tests.fuzz.hostile import hostile
from tests.fuzz.interruptions import Interruptions
from tests.fuzz.mutations import mutated
from tests.fuzz.pushes import Pushes
from tests.fuzz.targets import TARGETS, attempt, scratch, seeds_of

MEMORY = 2**30  # bytes, beyond which a fuzzer has found something
NAMES = [*TARGETS, *COMMANDS, *Interruptions.names, *Pushes.names]
Cases = Subject | Interruptions | Pushes
TURN = 2  # seconds of processor time in one process, before the next fuzzer has its turn


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
    subjects: dict[str, Cases] = {name: cases_of(name) for name in names if name not in TARGETS}
    counts: dict[str, Counter[str]] = collections.defaultdict(Counter)
    end = time.monotonic() + 60 * chosen.minutes
    try:
        while time.monotonic() < end:
            for name in names:
                first = chosen.seed + sum(counts[name].values())
                counts[name] += in_process(name, subjects.get(name), first, chosen.finds)
            (chosen.finds / "table").write_text(table(counts, chosen.seed))  # of what was done, should this be killed
    except KeyboardInterrupt:
        pass
    sys.stdout.write(table(counts, chosen.seed))
    bad = sum(count for kinds in counts.values() for kind, count in kinds.items() if kind not in (*GOOD, "taken"))
    if bad:
        sys.stdout.write(f"finds are in {chosen.finds}\n")
    return min(bad, 1)


def cases_of(name: str) -> Cases:
    """Return what damages and judges under a name."""
    if name in COMMANDS:
        return Subject(name)
    return Pushes(name) if name in Pushes.names else Interruptions(name)


def table(counts: Mapping[str, Counter[str]], seed: int) -> str:
    """Return what each fuzzer did, in a line."""
    lines = [f"from seed {seed}"]
    for name, kinds in counts.items():
        ends = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        lines.append(f"{name:20} {sum(kinds.values()):>11,}  {ends}")
    return "\n".join([*lines, ""])


def in_process(name: str, subject: Cases | None, seed: int, finds: Path) -> Counter[str]:
    """Return what became of the cases from a seed on, as many as come in a turn, in a process that may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.enable()
        start = time.process_time()
        with os.fdopen(writing, "w", buffering=1) as message:
            while time.process_time() - start < TURN:
                faulthandler.dump_traceback_later(2 * BLOCKED, exit=True)  # from code that hears no signal
                message.write(f"{seed} ")
                message.write(f"{one(name, subject, seed, finds)}\n")
                seed += 1
        scratch().remove()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as message:
        lines = [line.split(" ", 1) for line in message]
    _, status = os.waitpid(child, 0)
    kinds = Counter(line[1].strip() for line in lines if len(line) == 2 and line[1].strip())
    if status:
        kinds["crash"] += 1
        note(finds, name, lines[-1][0] if lines else "?", f"the process ended with status {status}")
    return kinds


def one(name: str, subject: Cases | None, seed: int, finds: Path) -> str:
    """Return the class of one case; what is no good one is written down."""
    if subject is not None:
        case = subject.case(seed)
        kind, what = case.kind, f"{case.what}\n{case.messages}"
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
    """Return what a target is given for a seed."""
    rng, seeds = random.Random(f"{name} {seed}"), seeds_of(name)
    if name == "attack":
        return hostile(rng)
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
    for each in gc.get_objects():  # what is imported already, of the project alone: all there is takes minutes
        if isinstance(each, FunctionType) and str(each.__module__).startswith(("mcore_convert.", "train_entry.")):
            atheris.instrument_func(each)
    atheris.Setup([sys.argv[0], *arguments, str(folder)], lambda data: attempt(name, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
