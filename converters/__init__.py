"""The model families, one file each. A new family is one file here and one name in `FAMILIES`."""

from converters import gpt2, llama

FAMILIES = (gpt2.FAMILY, llama.FAMILY)
