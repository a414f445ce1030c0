"""The configuration of a training run: its fields (`schema`), its composition from files and overrides (`compose`), and
the checks that may refuse it (`refusals`)."""
