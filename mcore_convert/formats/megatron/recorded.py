"""Files beside a Megatron checkpoint, most of them of other programs, recognised by names that only these use.

iter_0000010/tokenizer/                                     Megatron-LM since 0.20, Megatron-Bridge, NeMo-RL
iter_0000010/run_config.yaml, train_state.pt                Megatron-Bridge, NeMo-RL
global_step_10/actor/{transformer_config.json, huggingface/, dist_ckpt/}       verl up to 0.7
global_step_10/actor/{transformer_config.json, {model,optimizer,extra}/dist_ckpt/, model/huggingface/}    verl 0.8
NAME/{context/model.yaml, weights/}                         NeMo 2
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.base import Common
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.model_folder import TOKENIZER_FILES, carried_files
from mcore_convert.formats.files.torch_archive import TorchFile, scalar
from mcore_convert.formats.files.yaml_file import read_yaml
from mcore_convert.formats.megatron.run_directory import carried_in, name_of
from mcore_convert.spec.config import recorded
from mcore_convert.spec.config.recorded import NEMO, VERL, Recorded
from mcore_convert.storage.sources import Limit
from mcore_convert.storage.views import View

RUN_CONFIG, TRAIN_STATE, TOKENIZER = "run_config.yaml", "train_state.pt", "tokenizer"
TRANSFORMER_CONFIG, CONTENTS = "transformer_config.json", "ckpt_contents.json"
DIST, HUGGING_FACE = "dist_ckpt", "huggingface"
WEIGHTS, CONTEXT = "weights", "context"
STEP = re.compile(r"global_step_(\d{1,18})")
# Entries of a NeMo trainer's state that Megatron Core stores, too.
OF_MEGATRON = ("optimizer", "iteration", "checkpoint_version", "content_metadata")
# Fields of a run's progress in Megatron-Bridge (`training/state.py`, `TrainState`) that are arguments.
PROGRESS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
FLOPS = "floating_point_operations_so_far"


@dataclass(frozen=True)
class Beside:
    """Another program's files around a checkpoint; None if there is no such file."""

    program: str
    file: Path | None = None
    companions: Path | None = None
    iteration: int | None = None

    def read(self) -> Recorded | None:
        """Return the configuration.

        Raises:
            ConvertError: it cannot be read, or names unknown classes or functions.
        """
        if self.file is None:
            return None
        if self.program == VERL:
            return recorded.of_verl(read_json(self.file, Limit.SETTINGS), str(self.file))
        of_program = recorded.of_nemo if self.program == NEMO else recorded.of_bridge
        return of_program(read_yaml(self.file), str(self.file))


def beside(path: Path) -> Beside | None:
    """Return the files that another program has put around a checkpoint's own directory; None if there are none."""
    here = path.absolute()
    if (here / RUN_CONFIG).is_file():
        return Beside(recorded.BRIDGE, here / RUN_CONFIG, _folder(here / TOKENIZER))
    context = here.parent / CONTEXT
    if here.name == WEIGHTS and (context / "model.yaml").is_file():
        return Beside(NEMO, context / "model.yaml", _folder(context / "nemo_tokenizer"))
    role = role_of(here)
    if role is None:
        return None
    file = role / TRANSFORMER_CONFIG
    step = next((matched for each in (role, role.parent) if (matched := STEP.fullmatch(each.name))), None)
    if not file.is_file() and step is None:
        return None
    folder = _folder(role / "model" / HUGGING_FACE) or _folder(role / HUGGING_FACE)
    return Beside(VERL, file if file.is_file() else None, folder, None if step is None else int(step[1]))


def companions_of(path: Path) -> Path | None:
    """Return the folder of the original model's files, in a checkpoint's directory or beside it;
    None if there is none.
    """
    around = beside(path)
    return carried_in(path) or (_tokenizer_in(path) if around is None else around.companions)


def _tokenizer_in(path: Path) -> Path | None:
    """Return the folder in which Megatron-LM has saved the run's tokenizer (`save_tokenizer_assets`), if Hugging Face
    can read it: what is saved of a `TikTokenizer` bears the name of another file.
    """
    folder = path / TOKENIZER
    files = carried_files(folder, TOKENIZER_FILES) if folder.is_dir() else []
    return None if files in ([], ["tokenizer.json"]) else folder


def role_of(path: Path) -> Path | None:
    """Return the directory of a model that verl trains, given that of its distributed checkpoint."""
    if path.name != DIST:
        return None
    return path.parent.parent if path.parent.name in ("model", "optimizer", "extra") else path.parent


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def common_of(
    state: Mapping[str, Any],
    path: Path,
    rows: int | None,
    known: Mapping[str, Any],
    described: Mapping[str, Any] | None,
) -> Common:
    """Return the common state; if it has no arguments,
    with those that another program has stored beside it.

    Args:
        rows: rows of the embedding, used if the program does not have the padded number.
        known: arguments that follow from the tensors; they override the program's.
        described: arguments that are used if none are stored.

    Raises:
        ConfigError: the other program's configuration names unknown classes or functions.
    """
    whole = dict(state)
    around = None if isinstance(state.get("args"), argparse.Namespace) else beside(path)
    recorded = None if around is None else around.read()
    if recorded is not None:
        recorded = replace(recorded, args={"padded_vocab_size": rows, **recorded.args, **known})
    if around is not None:
        whole = with_recorded(state, path, around, recorded)
    args, iteration = whole.get("args"), whole.get("iteration")
    if args is None and described is not None:
        whole["args"] = argparse.Namespace(**described)
    return Common(
        dict(vars(args)) if isinstance(args, argparse.Namespace) else None,
        iteration if isinstance(iteration, int) else None,
        whole,
        recorded,
    )


def progress_files(here: Path, common: Common, path: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield Megatron-Bridge's files with a run's progress, as `Checkpoint.progress_files` does."""
    file = here / TRAIN_STATE
    if file.is_file() and common.recorded is not None and name == name_of(common.iteration):
        yield path / name / TRAIN_STATE, file
        yield path / f"latest_{TRAIN_STATE}", file


def with_recorded(state: Mapping[str, Any], path: Path, around: Beside, recorded: Recorded | None) -> dict[str, Any]:
    """Return the common state in Megatron-LM's form: with arguments, an iteration,
    and the scheduler under Megatron-LM's name.
    """
    whole = dict(state)
    if around.program == NEMO:
        whole = {name: value for name, value in whole.items() if name in OF_MEGATRON}
        step = state.get("global_step")
        if isinstance(step, int):
            whole["iteration"] = step
        stored = whole.get("optimizer")
        if isinstance(stored, list) and len(stored) == 1:  # Lightning may have several
            whole["optimizer"] = stored[0]
    if around.program == VERL and "lr_scheduler" in whole:
        whole["opt_param_scheduler"] = whole.pop("lr_scheduler")
    if around.iteration is not None:
        whole["iteration"] = around.iteration
    args = {} if recorded is None or not recorded.complete else dict(recorded.args)
    if (path / TRAIN_STATE).is_file():
        stored = TorchFile(path / TRAIN_STATE).tree
        if not isinstance(stored, dict):
            raise UnreadableCheckpoint(f"`{path / TRAIN_STATE}` does not hold the progress of a run")
        progress = {name: _number(stored[name]) for name in (*PROGRESS, FLOPS) if name in stored}
        args |= {name: progress[name] for name in PROGRESS if name in progress} if args else {}
        if FLOPS in progress:
            whole.setdefault(f"num_{FLOPS}", progress[FLOPS])
    if args:
        whole["args"] = argparse.Namespace(**args)
    return whole


def _number(value: Any) -> Any:
    return scalar(value) if isinstance(value, View) else value
