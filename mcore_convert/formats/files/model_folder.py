"""The small files of a Hugging Face model: configuration, tokenizer, generation config, card, license.

They are copied with a model into every format, so that the conversion back needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mcore_convert.storage.paths import files_in

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"
CARD = "README.md"  # credits the authors; copied as the card of the original model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)

# Files that are copied unchanged with the weights of a model.
CARRIED_FILES = (GENERATION_CONFIG, *TOKENIZER_FILES, CARD, "LICENSE", "LICENSE.md", "LICENSE.txt", "USE_POLICY.md")


def carried_files(path: Path, patterns: Sequence[str] = CARRIED_FILES) -> list[str]:
    """Return the names of the files in a directory that are copied with a model: tokenizer, generation config,
    chat template.
    """
    return [name for name in files_in(path) if any(fnmatch(name, pattern) for pattern in patterns)]
