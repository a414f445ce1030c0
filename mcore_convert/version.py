"""The version: the one place, from which packaging, checkpoints and cards take it."""

VERSION = "0.1.0"
