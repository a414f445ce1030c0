"""The format `hf`: Hugging Face directories, with safetensors or pickled weights."""

from mcore_convert.formats.base import Side
from mcore_convert.formats.format import Format
from mcore_convert.formats.hf.checkpoint import HfOptions, detect, directory_of, open_hf, reserve

FORMAT = Format(
    "hf", Side.HUGGING_FACE, detect, open_hf, reserve, HfOptions, "model.safetensors", directory_of=directory_of
)
