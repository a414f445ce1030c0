"""The version, where every module may read it."""

VERSION = "0.1.0"
