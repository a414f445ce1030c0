"""Checkpoints of the main branch of Megatron-LM, which calls itself 0.20 (22 August 2026): what differs from 0.19."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.chained import load, save
from fixtures.mp_rank import save_mp_rank
from fixtures.optimizer import random_state, save_with_optimizer
from mcore_convert import convert, reshard, verify
from mcore_convert.checkpoints.identify import open_checkpoint
from mcore_convert.errors import ConvertError
from mcore_convert.formats.base import Common
from mcore_convert.formats.files import dcp
from mcore_convert.formats.torch_dist.description import written_by
from mcore_convert.spec import gpt, releases
from mcore_convert.spec.config.arguments import normalise
from tests.conftest import HfMaker
from tests.oracle.test_latent import LATENT
from tests.oracle.test_linear_attention import HYBRID, MIXED
from tests.oracle.test_remainders import FULL, STATE, with_args
from tests.ranks import run_ranks

SIGN = {"mtp_hsm": False}  # an argument that all its runs store, and none of 0.19
STATES = "optimizer.state.module.module.module."
BUCKETS = "dp_reshardable"
GROUPS = "optimizer.param_to_group_meta.module.module.module."
INNER = "self_attention.linear_proj.weight"


def keys_of(path: Path) -> set[str]:
    directory = dcp.read(next(path.glob("iter_*")))
    return {*directory.tensors, *directory.objects}


def test_what_megatron_fsdp_calls_a_layer_that_predicts(tmp_path: Path) -> None:
    """0.20 renames weights and states as they are saved (`handle_mtp_in_state_dict`), and no field of a group."""
    args = {**LATENT, "swiglu": True}
    state = random_state(args)
    ranks = partial(save_mp_rank, args, state, tmp_path / "saved", optimizer="distributed", dtype=torch.bfloat16)
    run_ranks(1, ranks)
    old, new = "mtp.layers.0.transformer_layer.", "mtp.layers.0.mtp_model_layer."
    wanted = {"0.16": (old, old), "0.19": (new, new), "0.20": (old, new)}
    for release, (of_states, of_groups) in wanted.items():
        path = tmp_path / release
        reshard(tmp_path / "saved", path, to="fsdp_dtensor", for_megatron=release, implementation="local")
        keys = keys_of(path)
        assert f"model.module.{of_states}{INNER}" in keys
        for kept in ("exp_avg", "exp_avg_sq", "step"):
            assert f"{STATES}{of_states}{INNER}.{kept}" in keys
        assert f"{GROUPS}{of_groups}{INNER}.weight_decay" in keys
        other = {old, new} - {of_states, of_groups}
        assert not any(name in key for key in keys for name in other)
        fields = open_checkpoint(path).optimizer.fields  # type: ignore[attr-defined]
        assert f"{of_groups}{INNER}" in fields
        assert verify(tmp_path / "saved", path).equal
        reshard(path, tmp_path / f"back-{release}", to="torch", for_megatron=release)
        assert verify(tmp_path / "saved", tmp_path / f"back-{release}").equal


def test_fused_projections_of_latent_attention(tmp_path: Path) -> None:
    """Up to 0.19 Megatron-FSDP saves them as one, and since as two, but for the fields of their group."""
    args = {**LATENT, "swiglu": True, "mla_down_proj_fusion": True}
    ranks = partial(save_mp_rank, args, random_state(args), tmp_path / "saved", dtype=torch.bfloat16)
    run_ranks(1, partial(ranks, optimizer="distributed"))
    fsdp = partial(reshard, tmp_path / "saved", to="fsdp_dtensor", implementation="local")
    with pytest.raises(ConvertError, match="does not name the down-projections of latent attention"):
        fsdp(tmp_path / "old", for_megatron="0.19", optimizer=False)
    with pytest.raises(ConvertError, match="does not name the down-projections of latent attention"):
        fsdp(tmp_path / "new", for_megatron="0.20")
    fsdp(tmp_path / "new", for_megatron="0.20", optimizer=False)
    fsdp(tmp_path / "apart", for_megatron="0.19", given={"mla_down_proj_fusion": False})
    assert verify(tmp_path / "saved", tmp_path / "apart").equal


def test_runs_are_known_by_what_they_store() -> None:
    stored = {"mamba_training_ssm_states_dtype": None, "muon_scalar_optimizer": "adam", "batch_invariant_mode": False}
    assert releases.of_run(stored) == (0, 19)
    assert releases.of_run({**stored, **SIGN}) == (0, 20) == releases.parse("0.20.0")
    versions = [written_by(Common(args), Path("none")) for args in (stored, {**stored, **SIGN})]
    assert versions == ["Megatron Core 0.19", "Megatron Core 0.20 or later"]


def test_remainders_that_were_gathered_from_several_buckets(tmp_path: Path) -> None:
    """Since 0.20 they lie where they should; a run that does not tell its release may be older."""
    run_ranks(
        4, lambda: save_with_optimizer(FULL, STATE, tmp_path / "run", "fully_reshardable", tp=2, pp=2, remainders=True)
    )
    older = with_args(tmp_path / "run", tmp_path / "older", overlap_grad_reduce=True)
    with pytest.raises(ConvertError, match="gathered from several buckets"):
        reshard(older, tmp_path / "one")
    newer = with_args(tmp_path / "run", tmp_path / "newer", overlap_grad_reduce=True, **SIGN)
    reshard(newer, tmp_path / "one")
    assert verify(tmp_path / "run", tmp_path / "one").equal


def test_the_gated_delta_rule_in_short() -> None:
    """`gdn` is the same layer as `gated_delta_net`, which is the older name of it; `gdn2` has other gates."""
    short = normalise({**MIXED, "experimental_attention_variant": "gdn"})
    assert short == normalise(MIXED)
    assert not gpt.refusals(short)
    refused = gpt.refusals(normalise({**MIXED, "experimental_attention_variant": "gdn2"}))
    assert "`experimental_attention_variant` = 'gdn2'" in refused


def test_muon_leaves_the_projections_of_mixers_to_adam(tmp_path: Path) -> None:
    """In `mamba_mixer.py` they are marked so; which weights are Muon's is told by the momentums that are stored."""
    args = {**HYBRID, "hybrid_override_pattern": "M*M--M", "num_experts": None}
    state = random_state(args)
    run_ranks(
        2, lambda: save(args, "muon_and_distributed", state, tmp_path / "saved", "torch_dist", tp=2, form=BUCKETS)
    )
    reshard(tmp_path / "saved", tmp_path / "moved")
    assert verify(tmp_path / "saved", tmp_path / "moved").equal
    keys = keys_of(tmp_path / "moved")
    layer = "optimizer.state.{}.decoder.layers.0.mixer."
    for segment in gpt.MIXER_IN_PROJ:
        assert f"{layer.format('exp_avg_sq')}in_proj.weight.{segment}" in keys
    assert not any("in_proj" in key for key in keys if "momentum_buffer" in key)
    assert f"{layer.format('momentum_buffer')}out_proj.weight" in keys
    run_ranks(2, lambda: save(args, "muon", state, tmp_path / "ranks", "torch", pp=2))
    assert verify(tmp_path / "ranks", tmp_path / "moved").equal
    reshard(tmp_path / "ranks", tmp_path / "three", tp=2, pp=1)
    assert verify(tmp_path / "ranks", tmp_path / "three").equal
    reshard(tmp_path / "three", tmp_path / "four", for_megatron="0.16", implementation="local")
    ((differing, count),) = run_ranks(1, lambda: load(args, "muon", state, tmp_path / "four/iter_0000010", "torch"))
    assert (differing, count > 100) == ([], True)


@pytest.mark.parametrize("name", ["gdp_stack_spec", "gated_delta_product_inference_stack_spec"])
def test_hybrids_of_gated_products_are_refused(name: str) -> None:
    """Their layers `M` have the names of a Mamba mixer, and other segments."""
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", name]
    assert any("`spec` = " in line and name in line for line in gpt.refusals({**HYBRID, "spec": spec}))


def test_residual_streams_are_refused() -> None:
    args: dict[str, Any] = {**FULL, "enable_mhc_connections": True}
    assert "`enable_mhc_connections` = True" in gpt.refusals(normalise(args))


def test_the_tokenizer_that_is_saved_in_a_checkpoint(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """In `tokenizer/` of its directory, as `save_pretrained` writes it or as the files that a run names."""
    source = hf_checkpoint("llama-gqa")
    original = tmp_path / "run"
    convert(source, original)
    (folder,) = original.glob("*/hf")
    files = {path.name for path in folder.iterdir() if path.name.startswith(("token", "special", "chat"))}
    assert {"tokenizer.json", "tokenizer_config.json"} <= files
    saved = folder.rename(folder.with_name("tokenizer"))
    for path in saved.iterdir():
        if path.name not in files:
            path.unlink()
    for path in original.rglob("run_config.yaml"):
        path.unlink()
    done = convert(original, tmp_path / "hf")
    assert any("which tokens begin and end a text is not known; --hf-config" in note for note in done.notes)
    reshard(original, tmp_path / "moved", tp=2)
    convert(tmp_path / "moved", tmp_path / "again")
    for name in files:
        for there in ("hf", "again"):
            assert (tmp_path / there / name).read_bytes() == (source / name).read_bytes()
    for path in saved.iterdir():
        if path.name != "tokenizer.json":  # all that is saved of a `TikTokenizer`, whose file has another form
            path.unlink()
    assert open_checkpoint(original).companions is None
    (saved / "tokenizer.json").unlink()  # a `NullTokenizer` leaves an empty folder
    assert open_checkpoint(original).companions is None
    (saved / "vocab.json").write_text("{}")
    (saved / "merges.txt").write_text("")
    assert open_checkpoint(original).companions == saved
