"""torchrun --nproc-per-node 4 -m train_entry CONFIG [key=value ...] [--export-hf]

CONFIG is a YAML file or the name of a ready run; `mcore-convert train --list` shows them. Without torchrun, as
`python -m train_entry CONFIG`, the run has one rank. `--export-hf` writes the model for transformers at the end, as
checkpoint.export_hf=end does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from train_entry.command_line import run

if TYPE_CHECKING:
    from train_entry.config.schema import Config


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code."""
    return run(words, _pretrain, __doc__ or "")


def _pretrain(config: Config) -> None:
    from train_entry.pretrain import pretrain

    pretrain(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
