"""The format `fsdp_dtensor` of Megatron-FSDP: a plain torch DCP directory of DTensors."""

from mcore_convert.formats.base import Side
from mcore_convert.formats.format import Format
from mcore_convert.formats.fsdp_dtensor.checkpoint import FSDP_DTENSOR, detect, open_fsdp_dtensor
from mcore_convert.formats.fsdp_dtensor.writer import reserve, resume
from mcore_convert.formats.megatron.dcp_kinds import directory_of
from mcore_convert.formats.megatron.options import DcpOptions

FORMAT = Format(
    FSDP_DTENSOR,
    Side.MEGATRON,
    detect,
    open_fsdp_dtensor,
    reserve,
    DcpOptions,
    file_names=".metadata",
    holds_optimizer=True,
    directory_of=directory_of(detect),
    ckpt_format=FSDP_DTENSOR,
    arguments={"use_megatron_fsdp": True},
    resume=resume,
)
