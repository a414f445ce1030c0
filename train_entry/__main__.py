"""torchrun --nproc-per-node 4 -m train_entry CONFIG [key=value ...] [--export-hf]

CONFIG is a YAML file or the name of a ready run; `mcore-convert train --list` shows them. Without torchrun, as
`python -m train_entry CONFIG`, the run has one rank. `--export-hf` writes the model for transformers at the end, as
checkpoint.export_hf=end does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from mcore_convert.errors import ConvertError
from train_entry.extra import require_extra

REFUSED, USAGE, BUG = 1, 2, 3


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code. 0: done, or stopped by a signal after saving; 1: refused; 2: wrong usage; 3: a
    bug, here or in a flow or data set of one's own.
    """
    if not words or words[0] in ("-h", "--help"):
        if _is_first():
            tell(__doc__ or "")
        return 0 if words else USAGE
    try:
        return _train(words)
    except Exception as error:
        tell("".join(traceback.format_exception(error)))
        tell_error(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        return BUG


def _train(words: Sequence[str]) -> int:
    try:
        require_extra()
        from train_entry.config.compose import load_config

        config = load_config(words[0], words[1:])
    except ConvertError as error:
        if _is_first():  # all ranks read the same words
            tell_refusal(error)
        return refused()
    from train_entry.initialize import OtherRankError
    from train_entry.pretrain import pretrain

    try:
        pretrain(config)
    except OtherRankError:  # that rank tells it
        return refused()
    except ConvertError as error:
        tell_refusal(error)
        return REFUSED
    return 0


def tell(text: str) -> None:
    """Write a message to stderr at once, so that ranks that share a terminal do not cut into each other."""
    sys.stderr.write(f"{text.strip()}\n")
    sys.stderr.flush()


def tell_refusal(error: ConvertError) -> None:
    """Write a refusal in full to stderr, and in one line to where torchrun looks for it."""
    tell(f"error: {error}")
    items = "; ".join(error.items)
    hint = f" (hint: {' '.join(error.hint.split())})" if error.hint else ""
    record(f"{error.message}{': ' if items else ''}{items}{hint}")


def tell_error(line: str) -> None:
    """Write an error of one line to stderr, and to where torchrun looks for it."""
    tell(f"error: {line}")
    record(line)


def record(line: str) -> None:
    """Leave a line with which torchrun ends its own report, in the form of its `record` without a stack of calls."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": f"error: {' '.join(line.split())}", "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))


def refused() -> int:
    """The exit code of a rank that leaves the word to another, which must have had it before torchrun ends all."""
    time.sleep(1)
    return REFUSED


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
