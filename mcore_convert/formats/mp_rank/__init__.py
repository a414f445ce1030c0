"""The format `torch`: Megatron-LM's older checkpoints, one file per rank."""

from mcore_convert.formats.base import Side
from mcore_convert.formats.format import Format
from mcore_convert.formats.megatron.options import MegatronOptions
from mcore_convert.formats.mp_rank.directory import detect, directory_of, open_mp_rank
from mcore_convert.formats.mp_rank.writer import reserve, resume

FORMAT = Format(
    "torch",
    Side.MEGATRON,
    detect,
    open_mp_rank,
    reserve,
    MegatronOptions,
    "mp_rank_*",
    holds_optimizer=True,
    random_axis="ep",
    ckpt_format="torch",
    directory_of=directory_of,
    resume=resume,
)
