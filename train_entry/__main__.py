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
from collections.abc import Sequence
from pathlib import Path

from mcore_convert.errors import ConvertError
from train_entry.config.compose import load_config
from train_entry.report.console import write


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code. 0: done, or stopped by a signal after saving; 1: refused; 2: wrong usage."""
    if not words or words[0] in ("-h", "--help"):
        tell(__doc__ or "")
        return 0 if words else 2
    try:
        config = load_config(words[0], words[1:])
    except ConvertError as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks read the same words
            tell_error(error)
        return refused()
    from train_entry.initialize import OtherRankError
    from train_entry.pretrain import pretrain

    try:
        pretrain(config)
    except OtherRankError:  # that rank tells it
        return refused()
    except ConvertError as error:
        tell_error(error)
        return 1
    return 0


def tell(text: str) -> None:
    """Write a message to stderr."""
    write(text.strip())


def tell_error(error: ConvertError) -> None:
    """Write an error to stderr, and to where torchrun looks for the words to end its own report with."""
    tell(f"error: {error}")
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        told = {"message": {"message": f"error: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))


def refused() -> int:
    """The exit code of a rank that leaves the word to another, which must have had it before torchrun ends all."""
    time.sleep(1)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
