"""Output for a version of Megatron-LM: forms of optimizer state, orders of groups, where Adam counts steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mcore_convert import reshard, verify
from mcore_convert.cli import app
from mcore_convert.errors import ConvertError, LayoutError
from mcore_convert.formats.files import dcp
from mcore_convert.spec import releases
from tests.conftest import real_checkpoint
from tests.tensors import dcp_tensors

TE = "transformer_engine_names/"
OLD, NEW = "fully_sharded_model_space", "fully_reshardable"


def common_of(path: Path) -> dict[str, Any]:
    actual: dict[str, Any] = torch.load(path / "iter_0000010/common.pt", weights_only=False, map_location="cpu")
    return actual


def test_the_form_of_old_versions_is_what_they_saved(tmp_path: Path) -> None:
    """0.12.0 saved this run at TP2: the same keys, shapes, cells and bytes come back, and it is the default."""
    source = real_checkpoint(f"{TE}v0.12.0_llama_te_torch_dist")
    done = reshard(source, tmp_path / "out", tp=2)
    assert any(f"`{OLD}`: Megatron-LM up to 0.15 loads it" in note for note in done.notes)
    mine, real = (dcp.read(path / "iter_0000010") for path in (tmp_path / "out", source))
    states = {key for key in real.tensors if key.startswith("optimizer.")}
    assert len(states) == 3 * 9
    assert {key for key in mine.tensors if key.startswith("optimizer.")} == states
    for key in states:
        assert mine.tensors[key] == real.tensors[key]
        assert mine.unflattened[key] == real.unflattened[key]
    actual, wanted = dcp_tensors(tmp_path / "out/iter_0000010"), dcp_tensors(source / "iter_0000010")
    for key in states:  # as torch reads them, flattened
        assert torch.equal(actual[key], wanted[key])
    assert common_of(tmp_path / "out")["optimizer"]["param_state_sharding_type"] == OLD
    assert verify(tmp_path / "out", source).equal


def test_the_form_of_new_versions_can_be_asked_for(tmp_path: Path) -> None:
    source = real_checkpoint(f"{TE}v0.12.0_llama_te_torch_dist")
    done = reshard(source, tmp_path / "out", tp=2, for_megatron="0.16.1")
    assert any(f"`{NEW}`: Megatron-LM 0.15 and later load it" in note for note in done.notes)
    common = common_of(tmp_path / "out")
    assert common["optimizer"]["param_state_sharding_type"] == NEW
    assert common["content_metadata"]["distrib_optim_sharding_type"] == NEW
    mine = dcp.read(tmp_path / "out/iter_0000010")
    assert not mine.unflattened
    assert "optimizer.state.param.decoder.final_layernorm.weight" in mine.tensors


@pytest.mark.parametrize("name", ["llama_legacy_tp2pp2", "llama_tp2dp2", f"{TE}v0.16.1_llama_te_torch_dist"])
def test_runs_of_newer_versions_go_to_older_ones_and_back(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    assert common_form(source, tmp_path / "same", to="torch_dist") == NEW
    assert common_form(source, tmp_path / "old", to="torch_dist", tp=2, for_megatron="0.14") == OLD
    assert common_form(tmp_path / "old", tmp_path / "back", tp=2, for_megatron="0.19") == NEW
    assert verify(tmp_path / "old", source).equal
    assert verify(tmp_path / "back", source).equal


def common_form(source: Path, out: Path, **options: Any) -> Any:
    reshard(source, out, **options)
    common = common_of(out)
    assert common["args"].use_distributed_optimizer
    assert common["args"].ckpt_fully_parallel_save  # 0.12 asks for this form by it
    assert not common["args"].no_save_optim
    return common["optimizer"]["param_state_sharding_type"]


@pytest.mark.parametrize(
    ("version", "form", "prefixes"),
    [("0.13", OLD, {"chained_0.", "chained_1."}), ("0.14", OLD, {""}), ("0.16", NEW, {""})],
)
def test_chained_optimizers(version: str, form: str, prefixes: set[str], tmp_path: Path) -> None:
    """Up to 0.13 the keys of each optimizer begin with its number (`ChainedOptimizer.sharded_state_dict`)."""
    source = real_checkpoint(f"{TE}v0.16.1_moe_te_torch_dist")
    reshard(source, tmp_path / "out", ep=2, for_megatron=version)
    keys = [key for key in dcp.read(tmp_path / "out/iter_0000010").tensors if "optimizer." in key]
    assert {key.partition("optimizer.")[0] for key in keys} == prefixes
    experts = {key for key in keys if ".experts." in key}
    assert {key for key in keys if key.startswith("chained_1.")} == (experts if len(prefixes) == 2 else set())
    chained = common_of(tmp_path / "out")["optimizer"]
    assert {number: each["param_state_sharding_type"] for number, each in chained.items()} == {0: form, 1: form}
    assert verify(tmp_path / "out", source).equal


def groups_of(names: dict[str, torch.Tensor]) -> list[tuple[float, int]]:
    """Return what `_get_param_groups` of 0.12.3 makes of the parameters of a rank: as they come."""
    result: dict[float, int] = {}
    for name, tensor in names.items():
        wd_mult = 0.0 if name.endswith(".bias") or tensor.ndim == 1 else 1.0
        result[wd_mult] = result.get(wd_mult, 0) + 1
    return list(result.items())


@pytest.mark.parametrize("name", ["llama_legacy_vpp", "gpt2_legacy_tp2pp2", "llama_legacy_tp2pp2"])
def test_groups_are_in_the_order_that_the_version_has(name: str, tmp_path: Path) -> None:
    """Up to 0.15 groups are taken by their places, and a stage that begins with a norm has that group first."""
    source = real_checkpoint(name)
    for version in ("0.12.3", "0.16.1"):
        reshard(source, tmp_path / version, pp=2, for_megatron=version)
        for stage in range(2):
            file = tmp_path / version / f"iter_0000010/mp_rank_00_{stage:03d}/model_optim_rng.pt"
            content = torch.load(file, weights_only=False, map_location="cpu")
            inner = content["optimizer"]["optimizer"]
            wanted = groups_of({k: v for k, v in content["model"].items() if not k.endswith("_extra_state")})
            assert [wd_mult for wd_mult, _ in wanted] == ([0.0, 1.0] if stage else [1.0, 0.0])
            wanted = wanted if version == "0.12.3" else sorted(wanted, reverse=True)
            assert [group["wd_mult"] for group in inner["param_groups"]] == [wd_mult for wd_mult, _ in wanted]
            if "state" in inner:
                assert [len(group["params"]) for group in inner["param_groups"]] == [count for _, count in wanted]
                masters = content["optimizer"]["fp32_from_fp16_params"]
                for group, copies in zip(inner["param_groups"], masters, strict=True):
                    decayed = {copy.ndim > 1 for copy in copies}
                    assert decayed == {group["wd_mult"] == 1.0}
        assert verify(tmp_path / version, source).equal


@pytest.mark.parametrize("by_group", [True, False])
def test_adam_counts_where_it_did(by_group: bool, tmp_path: Path) -> None:
    """Apex and Transformer Engine count the steps of a group, torch those of each parameter."""
    source = real_checkpoint("gpt2_legacy_tp2pp2")
    for file in source.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False, map_location="cpu")
        inner = content["optimizer"]["optimizer"]
        for group in inner["param_groups"]:
            if by_group:
                group["step"] = 10
        for state in inner["state"].values():
            steps = state.pop("step") if by_group else state["step"]
            assert steps == 10
        copy = tmp_path / "run" / file.relative_to(source)
        copy.parent.mkdir(parents=True)
        torch.save(content, copy)
    reshard(tmp_path / "run/iter_0000010", tmp_path / "dist", to="torch_dist")
    state = common_of(tmp_path / "dist")["optimizer"]["optimizer"]
    assert ("common_step" in state["state"]) is not by_group
    assert all(("step" in group) is by_group for group in state["param_groups"])
    for number, origin in enumerate((tmp_path / "run/iter_0000010", tmp_path / "dist")):
        reshard(origin, tmp_path / str(number), to="torch")
        content = torch.load(
            tmp_path / str(number) / "iter_0000010/mp_rank_00/model_optim_rng.pt",
            weights_only=False,
            map_location="cpu",
        )
        inner = content["optimizer"]["optimizer"]
        assert all(("step" in group) is by_group for group in inner["param_groups"])
        assert all(("step" in each) is not by_group for each in inner["state"].values())
        assert {float(each["step"]) for each in (inner["param_groups"] if by_group else inner["state"].values())} == {
            10
        }


@pytest.mark.parametrize("installed", [True, False])
def test_the_norm_at_the_end_keeps_its_state(installed: bool, tmp_path: Path) -> None:
    """With Transformer Engine installed it is Transformer Engine's in Megatron's own layer spec, too."""
    source = real_checkpoint("llama_legacy_tp2pp2")
    for file in source.rglob("*.pt"):
        content = torch.load(file, weights_only=False, map_location="cpu")
        if installed and "decoder.final_layernorm.weight" in content.get("model", {}):
            content["model"]["decoder.final_layernorm._extra_state"] = torch.empty(0, dtype=torch.uint8)
        copy = tmp_path / "run" / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, copy)
    reshard(tmp_path / "run/iter_0000010", tmp_path / "out", pp=2)
    for stage in range(2):
        file = tmp_path / f"out/iter_0000010/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        keys = torch.load(file, weights_only=False)["model"]
        norms = [key for key in keys if key.endswith("layernorm._extra_state")]
        assert norms == (["decoder.final_layernorm._extra_state"] if installed and stage == 1 else [])


def test_versions() -> None:
    assert releases.parse("0.12") == releases.parse("core_v0.12.3") == releases.parse("v0.12.0rc2") == (0, 12)
    assert releases.parse("1.0") > releases.NEWEST
    for text in ("", "new", "0", "0.x"):
        with pytest.raises(ConvertError, match="no version"):
            releases.parse(text)
    with pytest.raises(ConvertError, match=r"0\.8 is the oldest"):
        releases.parse("0.7")


def test_what_a_version_does_not_have_is_refused(tmp_path: Path) -> None:
    source = real_checkpoint("llama_tp2pp2")
    with pytest.raises(LayoutError, match=r"needs Megatron-LM 0\.13 or later, not 0\.12"):
        reshard(source, tmp_path / "out", pp=2, pipeline_layout="Ett|ttL", for_megatron="0.12.3")
    result = CliRunner().invoke(app, ["reshard", str(source), str(tmp_path / "out"), "--for-megatron", "latest"])
    assert "`latest` is no version of Megatron-LM" in str(result.exception or result.output)
