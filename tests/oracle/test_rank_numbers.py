"""The numbers that Megatron Core gives to the ranks that write rank files: in the order of their directories."""

from __future__ import annotations

from itertools import product

import pytest

from mcore_convert.formats.mp_rank.layout import check_order, rank_name
from mcore_convert.megatron.cpu import import_megatron
from mcore_convert.spec.layout import Layout, Rank

SIZES = [
    (tp, cp, pp, ep, etp, dp)
    for tp, cp, pp, ep, etp, dp in product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 4))
    if etp <= tp and tp * cp * dp % (etp * ep) == 0  # a whole number of copies of experts
]


@pytest.mark.parametrize(("tp", "cp", "pp", "ep", "etp", "dp"), SIZES)
def test_ranks_write_directories_in_the_order_of_their_numbers(
    tp: int, cp: int, pp: int, ep: int, etp: int, dp: int
) -> None:
    import_megatron()
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    of_rest = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    of_experts = RankGenerator(tp=etp, ep=ep, dp=tp * cp * dp // (etp * ep), pp=pp, cp=1, order=order)
    layout = Layout(tp=tp, pp=pp, ep=ep, etp=etp)
    args = {}
    for copies in of_experts.get_ranks("dp"):
        number = copies[0]  # `save_checkpoint`: ranks that are the first of those with the same experts write
        place = [index(ranks, number) for ranks in (of_rest.get_ranks("tp"), of_rest.get_ranks("pp"))]
        rank = Rank(tp=place[0], pp=place[1], ep=index(of_experts.get_ranks("ep"), number))
        args[rank_name(rank, layout)] = {"rank": number}
    if len(args) == len(list(layout.ranks())):  # others have ranks that write nothing
        check_order(args, layout, "`run`")


def index(groups: list[list[int]], number: int) -> int:
    """Return the place of a rank in its group."""
    return next(group.index(number) for group in groups if number in group)
