"""Weights & Biases: the same curves, with the configuration, in one run over all resumptions."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_convert.errors import ConfigError
from train_entry.config.schema import Config
from train_entry.report.metrics import Evaluation, Interval
from train_entry.report.rows import Row, scalars_of


class Wandb:
    """Run on Weights & Biases. Its id is in `wandb/id` of the run directory, for a resumed run to continue it."""

    def __init__(self, config: Config, *, start: int) -> None:
        import wandb

        note = config.run_dir / "wandb" / "id"
        known = note.read_text().strip() if start > 0 and note.is_file() else None
        try:
            self._run = wandb.init(
                project=config.logging.wandb_project,
                name=config.logging.wandb_name or config.run_dir.resolve().name,
                dir=str(config.run_dir),
                config=config.model_dump(mode="json"),
                id=known,
                resume="allow",
            )
        except Exception as error:  # versions share no error class; without a key it is a UsageError
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"Weights & Biases does not start (`logging.wandb`): {reason}",
                hint="`wandb login` once, or WANDB_API_KEY=...; WANDB_MODE=offline keeps the curves on this machine; "
                "logging.wandb=false does without",
            ) from error
        note.parent.mkdir(exist_ok=True)
        note.write_text(self._run.id)

    def steps(self, interval: Interval, rows: Sequence[Row]) -> None:
        """Send the steps."""
        for row in rows:
            self._send(row)

    def evaluation(self, evaluation: Evaluation, row: Row) -> None:
        """Send the evaluation."""
        self._send(row)

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()

    def _send(self, row: Row) -> None:
        if row["iteration"] >= self._run.step:  # each earlier one has its first values, and does not take others
            self._run.log(scalars_of(row), step=row["iteration"])
