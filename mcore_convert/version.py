"""The version, defined once for packaging, checkpoints and cards."""

VERSION = "0.1.0"
