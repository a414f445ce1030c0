"""Ready runs with what each has to be given: data of its kind, and a tiny model where it starts from one."""

from __future__ import annotations

from pathlib import Path

from fixtures.tokenizer import make_tokenizer
from tests.conftest import HfMaker
from train_entry.config.compose import load_config
from train_entry.config.files import ready_runs
from train_entry.config.inputs import problems_of_start
from train_entry.data.prepare import prepare

ROWS = 421  # in the vocabulary of each stand-in, and tokens of its tokenizer


def prepared(folder: Path, vocab_size: int) -> Path:
    """Make a tokenizer of this size, and data with it; return the folder, with `tokenizer` and `text_text_document`."""
    make_tokenizer(folder / "tokenizer", vocab_size)
    (folder / "text.txt").write_text("A duck went to the pond.\n" * 200)
    prepare([str(folder / "text.txt")], str(folder / "text"), tokenizer=str(folder / "tokenizer"), workers=1)
    return folder


def takes_a_checkpoint(name: str) -> bool:
    """Return whether a run has its architecture from a checkpoint: a model of its own is not described."""
    return load_config(name).model.num_layers is None


FROM_CHECKPOINTS = [name for name in ready_runs() if takes_a_checkpoint(name)]
NEW_MODELS = [name for name in ready_runs() if not takes_a_checkpoint(name)]


def start_of(name: str, folder: Path, hf_checkpoint: HfMaker) -> list[str]:
    """Make a tiny model for a run to start from; return the overrides that name it.

    Args:
        folder: the working directory of the run. A Hub id that the run names lies in it as a directory, which comes
            before the Hub, so that the run keeps its own `checkpoint.init`.
    """
    config = load_config(name)
    variant = "qwen3_moe" if config.parallel.ep > 1 else "qwen3"
    model = hf_checkpoint(variant, config={"max_position_embeddings": config.training.seq_length, "vocab_size": ROWS})
    place = folder / (config.checkpoint.init or "model")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(model)
    return [] if config.checkpoint.init else [f"checkpoint.init={place}"]


def data_of(name: str, folder: Path) -> list[str]:
    """Make empty files of the data that a run names none of; return the overrides that name them."""
    kind = load_config(name).data.kind
    for file in ("a.jsonl", "a.bin", "a.idx"):
        (folder / file).touch()
    return {"mock": [], "sft": [f"data.paths=[{folder}/a.jsonl]"], "indexed": [f"data.paths=[{folder}/a]"]}[kind]


def lacks_a_start(name: str) -> bool:
    """Return whether a run cannot start without a checkpoint of the user's own."""
    return any("the model is not described" in line for line in problems_of_start(load_config(name)))
