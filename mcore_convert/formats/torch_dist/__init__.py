"""The formats `torch_dist`, Megatron's distributed checkpoints, and `zarr`, their former storage, read only."""

from mcore_convert.formats.base import Side
from mcore_convert.formats.format import Format
from mcore_convert.formats.megatron.options import DcpOptions
from mcore_convert.formats.torch_dist import zarr
from mcore_convert.formats.torch_dist.checkpoint import TORCH_DIST, ZARR, detect, directory_of, open_torch_dist
from mcore_convert.formats.torch_dist.form import resume
from mcore_convert.formats.torch_dist.writer import reserve

FORMAT = Format(
    TORCH_DIST,
    Side.MEGATRON,
    detect,
    open_torch_dist,
    reserve,
    DcpOptions,
    file_names=".metadata",
    holds_optimizer=True,
    random_axis="dp",
    ckpt_format=TORCH_DIST,
    directory_of=directory_of,
    resume=resume,
)
ZARR_FORMAT = Format(ZARR, Side.MEGATRON, zarr.detect, zarr.open_zarr, file_names=".zarray")
