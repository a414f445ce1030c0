"""The formats `hf`, Hugging Face directories, and `dcp`, torch DCP with Hugging Face's names."""

from mcore_convert.formats.base import Side
from mcore_convert.formats.format import Format
from mcore_convert.formats.hf import plain_dcp
from mcore_convert.formats.hf.checkpoint import HfOptions, detect, directory_of, open_hf, reserve

FORMAT = Format(
    "hf", Side.HUGGING_FACE, detect, open_hf, reserve, HfOptions, "model.safetensors", directory_of=directory_of
)
DCP_FORMAT = Format(plain_dcp.DCP, Side.HUGGING_FACE, plain_dcp.detect, plain_dcp.open_dcp, file_names=".metadata")
