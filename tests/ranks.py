"""Several ranks for a test: those of the fixtures."""

from fixtures.ranks import Child, RankError, run_ranks

__all__ = ["Child", "RankError", "run_ranks"]
