"""Any number of a `config.json` or of arguments may be a stranger's: a large one costs neither time nor memory."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints import families
from mcore_convert.errors import ConvertError
from mcore_convert.spec import gpt
from mcore_convert.spec.config import arguments
from mcore_convert.spec.config.completion import complete
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.layout import Layout
from tests.kinds import ROOT

CONFIGS = [path for path in sorted((ROOT / "fixtures" / "configs").glob("*.json")) if "-" not in path.stem]
LARGE = (10**11, -(10**11))
SECONDS, MEMORY = 5, 2**32


def read_config(config: dict[str, Any]) -> None:
    """Do what opening a Hugging Face directory does with its configuration."""
    args = arguments.normalise(families.of_config(config).config.to_megatron(config))
    sizes_of(args)


def read_arguments(args: dict[str, Any]) -> None:
    """Do what opening a Megatron checkpoint does with its arguments."""
    args = arguments.normalise(args)
    families.choose(args)
    gpt.refusals(args)
    sizes_of(args)
    assert sum(1 for _ in Layout.of(args).ranks()) < 10**6


def sizes_of(args: dict[str, Any]) -> None:
    dims = Dims.of(args, vocab_size=args["vocab_size"], padded_vocab_size=args["vocab_size"])
    assert sum(1 for _ in gpt.family(args).instances(dims)) < 10**7


def cases(path: Path) -> Iterator[tuple[Callable[[dict[str, Any]], None], dict[str, Any]]]:
    config = json.loads(path.read_text())
    architecture = families.of_config(config).config.to_megatron(config)
    args = complete(architecture, dtype="bfloat16", tp=1, pp=1, vocab_size=architecture["vocab_size"])
    for read, values in ((read_config, config), (read_arguments, args)):
        read(dict(values))
        for name, value in values.items():
            if isinstance(value, int) and not isinstance(value, bool):
                for large in LARGE:
                    yield read, {**values, name: large}


def try_all() -> None:
    """Print how many numbers were tried; end with a signal at one that is neither refused nor read quickly."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.register(signal.SIGALRM, chain=True)
    count = 0
    for path in CONFIGS:
        for read, values in cases(path):
            signal.alarm(SECONDS)
            with contextlib.suppress(ConvertError):
                read(values)
            count += 1
    sys.stdout.write(str(count))


def test_a_large_number_is_refused_or_read() -> None:
    """In a process of its own, which has a bound on its memory, and ends where one number takes seconds."""
    code = f"from {__name__} import try_all; try_all()"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 2000
