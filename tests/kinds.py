"""The kinds of tests, each a marker: of which kind a test is, and the files of a kind.

| kind | its tests |
| --- | --- |
| unit | run in this process, in seconds, with no model and no network: what `make check` runs |
| oracle | compare with Megatron Core, transformers, the Hub's client, or checkpoints that Megatron-LM wrote |
| train | run the training entry, or the demo and the documentation, which train too |
| browser | open pages in Chromium |

A test is of the kind of its file, and a file of the kind of its folder. A marker of a kind on a test comes before that:
a few tests in files of units run a model. A unit test that starts a process or takes seconds is marked `slow` and left
out of `make check`; one that starts a process and is not marked fails (see `conftest.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

KINDS = ("unit", "oracle", "train", "browser")
TESTS = Path(__file__).parent
ROOT = TESTS.parent

# Files that are in no folder of a kind. What is listed nowhere is an oracle: it is never in `make check` by accident.
FILES = {
    "unit": """
        arguments cast cli destination docs_site errors errors_page families flat formats imports kinds mp_rank_old pack
        page pickles project report tracker values verify
    """,
    "oracle": """
        benchmarks config dialects expert_norm export fixtures layout megatron_fixtures megatron_load megatron_room
        mp_rank mp_rank_real old_classes push ranks real_checkpoints reshard reshard_errors resume serve shifted_state
        streams sweep tokenizer_files torch_dist_optimizer zarr
    """,
    "train": """
        data_prepare data_sets flows hand_over readme train_benchmark train_checkpoints train_config train_damaged
        train_errors train_experts train_gpu train_kill train_layouts train_model train_nodes train_pretrain
        train_refusals train_resume
    """,
    "browser": "page_browser",
}


def kind_of(path: Path) -> str:
    """Return the kind of a test file, by its folder, and else by its name."""
    folder = path.relative_to(TESTS).parts[0]
    if folder in KINDS:
        return folder
    name = path.stem.removeprefix("test_")
    return next((kind for kind, names in FILES.items() if name in names.split()), "oracle")


def files_of(kind: str) -> list[Path]:
    """Return the test files of a kind."""
    return [path for path in sorted(TESTS.rglob("test_*.py")) if kind_of(path) == kind]


if __name__ == "__main__":
    sys.stdout.write("\n".join(str(path.relative_to(ROOT)) for path in files_of(sys.argv[1])) + "\n")
