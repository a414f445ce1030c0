"""The picture of a layout: what `inspect` says of a rank is what that rank's file holds."""

from __future__ import annotations

import pytest

from mcore_convert import inspect
from mcore_convert.checkpoints.identify import identify
from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.mp_rank.layout import rank_name
from tests.conftest import real_checkpoint

NAMES = ["gpt2_legacy_tp2pp2", "llama_legacy_tp2pp2", "llama_legacy_vpp", "moe_legacy_pp2ep2"]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_layers_are_those_of_the_rank_files(name: str) -> None:
    path = real_checkpoint(name)
    layout = identify(path).checkpoint.saved_layout
    assert layout is not None
    parts = inspect(path).ranks
    assert len(parts) == layout.tp * layout.pp * layout.ep > 1
    for part in parts:
        file = path / "iter_0000010" / rank_name(part.rank, layout) / "model_optim_rng.pt"
        stages = [stage for key, stage in TorchFile(file).tree.items() if key.startswith("model")]
        tensors = [tensor for stage in stages for key, tensor in stage.items() if "_extra_state" not in key]
        assert part.nbytes == sum(tensor.nbytes for tensor in tensors)
        result = [len({key.split(".")[2] for key in stage if key.startswith("decoder.layers.")}) for stage in stages]
        assert [len(layers) for layers in part.layers] == result
