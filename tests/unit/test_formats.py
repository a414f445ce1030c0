"""hf -> torch_dist -> hf is the identity, for every variant, layout, and way a Hugging Face directory is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixtures.families import BY_TP
from fixtures.run import make_run
from mcore_convert import ConvertError, convert, inspect, reshard, verify
from mcore_convert.checkpoints.identify import identify
from mcore_convert.checkpoints.weights import find_weights
from mcore_convert.spec.names import drop, placeholders_of, spell
from tests.conftest import HfMaker
from tests.tensors import assert_same_tensors, dcp_tensors, hf_tensors

CARRIED = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), BY_TP)
def test_there_and_back(name: str, tp: int, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint(name)
    groups = identify(source).dims.num_query_groups
    if groups % tp and tp % groups:
        pytest.skip("this TP does not divide the query groups, which tests/unit/test_errors.py covers")
    convert(source, tmp_path / "dist", tp=tp)
    convert(tmp_path / "dist", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())
    for file in CARRIED:
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_dtypes_are_kept(name: str, dtype: str, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint(name, dtype=dtype)
    convert(source, tmp_path / "dist", tp=2)
    assert inspect(tmp_path / "dist").dtypes == (dtype,)
    convert(tmp_path / "dist", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config.get("torch_dtype") or config["dtype"]) == dtype


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("llama-gqa", {"shards": 3}),
        ("llama-gqa", {"file_format": "bin"}),
        ("llama-gqa", {"file_format": "bin", "shards": 2}),
        ("llama-gqa", {"file_format": "bin_legacy"}),
        ("llama-tied", {"tied_head": True}),
        ("gpt2", {"prefix": False}),
        ("gpt2", {"prefix": False, "file_format": "bin_legacy"}),
        ("gpt2", {"mask_buffers": True}),
        ("gpt2", {"tied_head": True}),
    ],
    ids=str,
)
def test_every_way_a_directory_is_stored_gives_the_same(
    name: str, stored: dict[str, Any], hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    plain = hf_checkpoint(name)
    convert(hf_checkpoint(name, **stored), tmp_path / "dist")
    convert(tmp_path / "dist", tmp_path / "back")
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(plain))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_torch_reads_the_same_global_tensors_at_every_tp(
    name: str, tp: int, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint is the oracle for what was written; the vocabulary is all that depends on TP."""
    source = hf_checkpoint(name)
    convert(source, tmp_path / "dist", tp=tp)
    actual = dcp_tensors(tmp_path / "dist/release")
    convert(source, tmp_path / "reference")
    wanted = dcp_tensors(tmp_path / "reference/release")
    assert sorted(actual) == sorted(wanted)
    vocab = identify(source).dims.vocab_size
    for key, tensor in wanted.items():
        mine = actual[key]
        if key in (EMBEDDING, "output_layer.weight"):
            assert mine.shape[0] % (128 * tp) == 0
            assert not mine[vocab:].any()
            mine, tensor = mine[:vocab], tensor[:vocab]
        assert torch.equal(mine, tensor), key


def test_one_chunk_per_layer_and_rank(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Boxes that Megatron's ranks own: no rank loads another layer or another rank's rows."""
    convert(hf_checkpoint("llama-gqa"), tmp_path / "dist", tp=2)
    model = identify(tmp_path / "dist")
    directory = model.checkpoint.directory  # type: ignore[attr-defined]
    for weight, at in model.family.instances(model.dims):
        assert weight.mcore is not None
        axes = placeholders_of(weight.mcore)
        boxes = [chunk.box for chunk in directory.chunks[spell(drop(weight.mcore, *axes), at)]]
        mine = [box for box in boxes if not axes or box.offsets[0] == at.layer]
        assert all(box.sizes[: len(axes)] == (1,) * len(axes) for box in mine)
        assert len(mine) == (1 if weight.shard.dim is None else 2 * len(weight.shard.parts))


@pytest.mark.parametrize("size", [10**9, 60_000, 1])
def test_shards_by_size(size: int, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa", dtype="bfloat16", config={"num_hidden_layers": 4})
    convert(source, tmp_path / "dist")
    done = convert(tmp_path / "dist", tmp_path / "back", max_shard_size=size)
    assert_same_tensors(hf_tensors(tmp_path / "back"), hf_tensors(source))
    made = sorted((tmp_path / "back").glob("*.safetensors"))
    assert made == sorted(done.plan.reservation.sizes)
    for file in made:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= size
    if len(made) == 1:
        assert size == 10**9
    else:
        assert made[0].name == f"model-00001-of-{len(made):05d}.safetensors"
        index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in hf_tensors(source).values())


def test_a_directory_may_be_rewritten_in_its_own_format(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("gpt2", prefix=False)
    convert(source, tmp_path / "again", to="hf")
    assert_same_tensors(hf_tensors(tmp_path / "again"), hf_tensors(hf_checkpoint("gpt2")))
    convert(source, tmp_path / "tp2", tp=2)
    convert(tmp_path / "tp2", tmp_path / "tp1", to="torch_dist")
    convert(source, tmp_path / "direct")
    mine, wanted = dcp_tensors(tmp_path / "tp1/release"), dcp_tensors(tmp_path / "direct/release")
    assert all(torch.equal(mine[key], tensor) for key, tensor in wanted.items())


def test_a_given_configuration_is_kept_but_for_what_the_checkpoint_proves(
    hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = hf_checkpoint("llama-gqa")
    convert(source, tmp_path / "dist")
    config = json.loads((source / "config.json").read_text())
    config |= {"bos_token_id": 5, "rms_norm_eps": 0.5, "_name_or_path": "somebody/llama"}
    (tmp_path / "given.json").write_text(json.dumps(config))
    done = convert(tmp_path / "dist", tmp_path / "back", hf_config=tmp_path / "given.json")
    written = json.loads((tmp_path / "back/config.json").read_text())
    true = json.loads((source / "config.json").read_text())["rms_norm_eps"]
    assert written == {**config, "rms_norm_eps": true}
    assert [note for note in done.notes if "rms_norm_eps" in note] == [
        f"config.json: `rms_norm_eps` 0.5 -> {true}, as the checkpoint has it"
    ]


def test_an_iteration_directory_is_written_and_read(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa")
    done = convert(source, tmp_path / "dist", iteration=25)
    assert (tmp_path / "dist/latest_checkpointed_iteration.txt").read_text() == "25"
    assert any("--finetune" in note for note in done.notes)
    for path in (tmp_path / "dist", tmp_path / "dist/iter_0000025"):
        assert inspect(path).iteration == 25
        assert verify(source, path).equal


def test_a_training_run_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [10, 20], picture=False)
    newest, before = (run / "checkpoints" / f"iter_{iteration:07}" for iteration in (20, 10))
    assert inspect(run).iteration == 20
    assert verify(run, newest).equal
    assert not verify(run, before).equal
    convert(run, tmp_path / "hf")
    reshard(run, tmp_path / "moved", tp=2)
    assert verify(tmp_path / "hf", newest).equal
    assert verify(tmp_path / "moved", newest).equal


def test_what_was_planned_is_what_is_written(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    source = hf_checkpoint("llama-gqa")
    dry = convert(source, tmp_path / "dist", tp=2, dry_run=True)
    assert not (tmp_path / "dist").exists()
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "dist", tp=2, progress=lambda done, total: seen.append((done, total)))
    facts = dry.as_dict()
    for name, size in facts["target"]["files"].items():
        assert (tmp_path / "dist" / name).stat().st_size == size
    assert seen[-1] == (facts["nbytes"], facts["nbytes"])
    assert facts["nbytes"] == sum(tensor.nbytes for tensor in hf_tensors(source).values())
    model = identify(source)
    assert facts["num_parameters"] * 4 == facts["nbytes"]
    assert len(find_weights(model.family, model.dims, model.checkpoint).slots) == len(dry.plan.moves)


def test_a_given_directory_brings_its_tokenizer(hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    import shutil

    source = hf_checkpoint("llama-gqa")
    convert(source, tmp_path / "dist")
    shutil.rmtree(tmp_path / "dist/release/hf")
    bare = convert(tmp_path / "dist", tmp_path / "bare")
    assert any("no tokenizer is carried along" in note for note in bare.notes)
    done = convert(tmp_path / "dist", tmp_path / "back", hf_config=source)
    assert not done.notes[:-1]  # the last says that the padding is cut
    for file in ["config.json", *CARRIED]:
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize(
    ("direction", "options", "named"),
    [
        ("import", {"hf_config": "config.json"}, "a Hugging Face source has no use for --hf-config"),
        ("import", {"vocab_size": 421}, "a Hugging Face source has no use for --vocab-size"),
        ("import", {"revision": "main"}, "a directory has no use for --revision"),
        ("export", {"tp": 2, "pp": 2}, "a Hugging Face target has no use for --tp, --pp"),
        ("export", {"tokenizer": "gpt2"}, "a Hugging Face target has no use for --tokenizer"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    direction: str, options: dict[str, Any], named: str, hf_checkpoint: HfMaker, tmp_path: Path
) -> None:
    source = hf_checkpoint("llama-gqa")
    if direction == "export":
        convert(source, tmp_path / "dist")
        source = tmp_path / "dist"
    with pytest.raises(ConvertError, match=named):
        convert(source, tmp_path / "out", **options)
