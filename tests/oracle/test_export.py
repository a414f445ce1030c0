"""Exports: complete directories that transformers loads, with a conversion's weights, and a card that is true."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from fixtures.run import make_run
from fixtures.tokenizer import make_tokenizer
from mcore_convert import Export, convert, export, verify
from mcore_convert.errors import ConvertError, DataError, UnwritableTarget
from tests.conftest import HfMaker, real_checkpoint
from tests.refusals import run, tree
from tests.tensors import assert_same_tensors, hf_tensors

NAMES = ("gpt2", "llama-gqa")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each family, two iterations long."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: make_run(folder / f"{name}-run", [50, 100], name=name) for name in NAMES}


@pytest.fixture(scope="module")
def exported(runs: dict[str, Path]) -> dict[str, Export]:
    return {name: export(path) for name, path in runs.items()}


@pytest.fixture
def small(tmp_path: Path, runs: dict[str, Path]) -> Path:
    """A run of one iteration, to be changed."""
    path = tmp_path / "run"
    shutil.copytree(runs["llama-gqa"], path)
    shutil.rmtree(path / "hf", ignore_errors=True)
    shutil.rmtree(iteration(path, 50))
    return path


def path_of(done: Export) -> Path:
    assert done.path is not None
    return done.path


def iteration(path: Path, number: int = 100) -> Path:
    return path / "checkpoints" / f"iter_{number:07d}"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_a_conversion_makes_and_transformers_loads(
    name: str, runs: dict[str, Path], exported: dict[str, Export], tmp_path: Path
) -> None:
    path = path_of(exported[name])
    assert path == runs[name] / "hf" / "iter_0000100"
    convert(iteration(runs[name]), tmp_path / "converted", to="hf")
    assert_same_tensors(hf_tensors(path), hf_tensors(tmp_path / "converted"))
    model = AutoModelForCausalLM.from_pretrained(path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert_same_tensors(model.state_dict(), other.state_dict())
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 0)
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_tells_a_story(name: str, exported: dict[str, Export]) -> None:
    path = path_of(exported[name])
    generator = pipeline("text-generation", model=str(path), device_map="auto")
    text = generator("Once upon a time", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    tokens = AutoTokenizer.from_pretrained(path)("Once upon a time", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(path)
    again = model.generate(**tokens, max_new_tokens=5, do_sample=False)
    assert text == generator.tokenizer.decode(again[0], skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_places_it_over_devices(name: str, exported: dict[str, Export], tmp_path: Path) -> None:
    """On a machine whose memory takes only the first layers, the others stay on the disk."""
    path, room = path_of(exported[name]), {"cpu": 600_000}
    model = AutoModelForCausalLM.from_pretrained(path, device_map="auto", max_memory=room, offload_folder=tmp_path)
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, AutoModelForCausalLM.from_pretrained(path)(tokens).logits)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_is_true(
    name: str, exported: dict[str, Export], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = exported[name]
    path = path_of(done)
    card = ModelCard.load(path / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatron-core", "mcore-convert", name.partition("-")[0]],
    }
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", card.text, re.M))
    model = AutoModelForCausalLM.from_pretrained(path)
    assert rows["parameters"] == f"{model.num_parameters():,}"
    assert rows["vocabulary"] == f"{model.config.vocab_size:,}"
    assert rows["layers"] == str(model.config.num_hidden_layers)
    assert rows["iteration"] == "100 of 2,000"
    assert rows["tokens"] == f"{100 * 8 * 128:,}"
    assert rows["loss"] == "1.0500"
    assert rows["loss, valid"] == "3.5000"
    assert rows["data"] == "`stories_text_document (0.7)`, `news_text_document (0.3)`"
    assert rows["parallel layout of the source"] == "tp 1, pp 1, on 1 rank"
    assert rows["source"] == f"`iter_0000100` of `{name}-run`, in the format `torch_dist`"
    assert rows["checksum of the weights"] == f"`{done.checksum}`"
    assert "![The loss over the training](loss.png)" in card.text
    assert (path / "loss.png").read_bytes()[:4] == b"\x89PNG"

    monkeypatch.chdir(path)
    blocks = re.findall(r"```python\n(.*?)```", card.text, re.S)
    assert len(blocks) == 2
    exec("".join(blocks).replace("max_new_tokens=50", "max_new_tokens=3"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_the_checksum_is_that_of_the_weights_whatever_their_layout(
    runs: dict[str, Path], exported: dict[str, Export], tmp_path: Path
) -> None:
    name = "llama-gqa"
    lines = []
    for key, tensor in hf_tensors(path_of(exported[name])).items():
        digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        lines.append(f"{key} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest}\n")
    assert exported[name].checksum == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    convert(iteration(runs[name]), tmp_path / "ranks", to="torch", tp=2, pp=2)
    rounded = export(tmp_path / "ranks", dtype="bfloat16", max_shard_size=200_000)
    assert rounded.checksum == exported[name].checksum
    result = hf_tensors(path_of(rounded))
    assert_same_tensors(result, {k: t.bfloat16() for k, t in hf_tensors(path_of(exported[name])).items()})
    assert len(list(path_of(rounded).glob("model-*.safetensors"))) == 3
    card = (path_of(rounded) / "README.md").read_text()
    assert "| dtype of the source | float32, cast to bfloat16, rounded to nearest |" in card
    assert "| parallel layout of the source | tp 2, pp 2, on 4 ranks |" in card
    assert AutoModelForCausalLM.from_pretrained(path_of(rounded)).dtype == torch.bfloat16


def test_where_it_lies(small: Path, monkeypatch: pytest.MonkeyPatch, hf_checkpoint: HfMaker) -> None:
    def place(source: Path, *rest: Path) -> str:
        return str(path_of(export(source, *rest, dry_run=True)))

    step = iteration(small)
    assert place(small) == place(small / "checkpoints") == place(step) == str(small / "hf" / step.name)
    assert place(step, small / "mine") == str(small / "mine")
    convert(hf_checkpoint("gpt2"), small / "converted")
    assert place(small / "converted") == str(small / "converted-hf")
    assert place(small / "converted" / "release") == str(small / "converted" / "release-hf")
    for name in ("config.yaml", "metrics.jsonl", "loss.png"):
        (small / name).unlink()  # what Megatron-LM's --save leaves
    assert place(step) == str(small / "checkpoints" / "hf" / step.name)
    monkeypatch.chdir(small / "converted")
    assert place(Path()) == str(small / "converted-hf")
    assert not (small / "hf").exists()


def test_it_appears_whole_or_not_at_all(small: Path) -> None:
    before = tree(small)
    for share in (0.2, 0.6, 0.99):  # while it is copied, and while it is read again

        def stop(done: int, total: int, share: float = share) -> None:
            if done >= share * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export(small, progress=stop)
        assert tree(small) == before
    done = export(small)
    with pytest.raises(UnwritableTarget, match="exists"):
        export(small)
    assert export(small, overwrite=True).checksum == done.checksum


def test_progress_ends_at_its_total(small: Path) -> None:
    messages: list[tuple[int, int]] = []
    export(small, progress=lambda done, total: messages.append((done, total)))
    assert messages[-1][0] == messages[-1][1] == max(done for done, _ in messages)
    assert len({total for _, total in messages}) == 1


def test_without_a_tokenizer_nothing_is_guessed(small: Path) -> None:
    folder = iteration(small) / "hf"
    shutil.rmtree(folder)
    ended = run("export", small)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.replace(f"{small}/", "") == (
        "error: there is no tokenizer for `checkpoints/iter_0000100`\n"
        "         none was carried along: the checkpoint has no folder `hf`\n"
        "hint: pass --tokenizer DIR, or a name on the Hub; --no-tokenizer exports the model alone\n"
    )
    alone = export(small, with_tokenizer=False)
    assert not [name for name in alone.files if "token" in name]
    assert "AutoModelForCausalLM.from_pretrained" in (path_of(alone) / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(path_of(alone))
    with pytest.raises(DataError, match="has no tokenizer"):
        export(small, tokenizer=str(small))


def test_a_tokenizer_must_fit(small: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    make_tokenizer(tmp_path / "large", 440)
    with pytest.raises(DataError) as refused:
        export(small, tokenizer=str(tmp_path / "large"))
    assert refused.value.message == "the tokenizer has 440 tokens, and the model a vocabulary of 421"
    assert refused.value.hint == "--vocab-size 440 keeps that many of its 512 rows"
    done = export(small, tokenizer=str(tmp_path / "large"), vocab_size=440)
    assert AutoModelForCausalLM.from_pretrained(path_of(done)).config.vocab_size == 440
    (tmp_path / "huge").mkdir()
    make_tokenizer(tmp_path / "huge", 600)
    with pytest.raises(DataError) as refused:
        export(small, tokenizer=str(tmp_path / "huge"), overwrite=True)
    assert refused.value.hint == "was the model trained with another tokenizer? --tokenizer names it"
    (tmp_path / "less").mkdir()
    make_tokenizer(tmp_path / "less", 400)
    done = export(small, tokenizer=str(tmp_path / "less"), overwrite=True)
    assert "the tokenizer has 400 tokens, and the vocabulary 421 rows: 400 to 420 stand for no text" in done.notes
    assert len(AutoTokenizer.from_pretrained(path_of(done))) == 400


def test_another_tokenizer_brings_its_own_tokens(small: Path, tmp_path: Path) -> None:
    """What begins and ends a text is what the tokenizer says that goes along, and not the one in whose place it is."""
    folder = iteration(small) / "hf"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "temperature": 0.5}))
    assert json.loads((path_of(export(small)) / "generation_config.json").read_text())["eos_token_id"] == 7
    make_tokenizer(tmp_path, 300)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|user|>"}))
    path = path_of(export(small, tokenizer=str(tmp_path), overwrite=True))
    wanted = AutoTokenizer.from_pretrained(path).eos_token_id
    assert json.loads((path / "generation_config.json").read_text()) == {
        "temperature": 0.5,
        "bos_token_id": 0,
        "eos_token_id": wanted,
        "pad_token_id": 0,
    }
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == wanted


def saved(path: Path, **args: Any) -> Path:
    """Return a run without anything beside its checkpoint, whose arguments do not say the vocabulary."""
    return make_run(path, [10], tokenizer=False, args={"vocab_size": None, **args}, picture=False)


def test_a_tokenizer_that_the_run_names_tells_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    make_tokenizer(tmp_path / "tokenizer", 389)
    path = saved(tmp_path / "run", tokenizer_model=str(tmp_path / "tokenizer"))
    done = export(path)
    assert "the vocabulary is the tokenizer's: 389 tokens" in done.notes
    assert AutoModelForCausalLM.from_pretrained(path_of(done)).config.vocab_size == 389
    assert len(AutoTokenizer.from_pretrained(path_of(done))) == 389
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(DataError) as refused:
        export(path, overwrite=True)
    assert refused.value.items[1] == f"`{tmp_path / 'tokenizer'}`, which the training run names, is not there"


def test_the_vocabulary_and_merges_of_a_megatron_run(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, 389)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    vocabulary, merges = tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"
    vocabulary.write_text(json.dumps(model["vocab"]))
    merges.write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    names = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocabulary), "merge_file": str(merges)}
    path = path_of(export(saved(tmp_path / "run", **names)))
    tokenizer, original = AutoTokenizer.from_pretrained(path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("Once there was a duck").input_ids == original("Once there was a duck").input_ids
    assert tokenizer.eos_token_id == 0
    merges.unlink()
    with pytest.raises(DataError, match="there is no tokenizer"):
        export(tmp_path / "run", overwrite=True)


def test_what_the_original_says_of_itself_goes_on(small: Path, hf_checkpoint: HfMaker, tmp_path: Path) -> None:
    """Its licence, language and generation config hold for what was made of it; its card is not the new model's."""
    original = Path(shutil.copytree(hf_checkpoint("llama-gqa"), tmp_path / "original"))
    (original / "README.md").write_text(
        "---\nlicense: mit\nlanguage:\n- en\ndatasets:\n- its/own\n---\n# The original\n"
    )
    (original / "LICENSE").write_text("Do as you like.")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "_name_or_path": "someone/llama"}))
    wanted = {"license": "mit", "language": ["en"], "base_model": "someone/llama"}

    def check(done: Export, **more: Any) -> None:
        path = path_of(done)
        data = ModelCard.load(path / "README.md").data.to_dict()
        assert {name: data[name] for name in ("license", "language", "base_model")} == {**wanted, **more}
        assert "# The original" not in (path / "README.md").read_text()
        assert (path / "LICENSE").read_text() == "Do as you like."
        generation = (path / "generation_config.json").read_text()
        assert json.loads(generation) == json.loads((original / "generation_config.json").read_text())

    check(export(small, hf_config=original))
    convert(original, tmp_path / "carried", tp=2)
    check(export(tmp_path / "carried"))
    check(export(original, dtype="bfloat16", metadata={"license": "apache-2.0"}), license="apache-2.0")
    convert(tmp_path / "carried", tmp_path / "back")
    assert not (tmp_path / "back" / "README.md").exists()
    (original / "README.md").write_text("---\nlicense: [\n---\n")
    export(small, hf_config=original, overwrite=True)


def test_a_card_for_the_hub_names_the_repository(small: Path) -> None:
    from mcore_convert.publishing.export import prepare, write

    prepared = prepare(small, small / "out", {}, repo="ada/llama", revision="iter_0000100")
    write(prepared)
    card = (small / "out" / "README.md").read_text()
    assert 'model="ada/llama", revision="iter_0000100")' in card
    assert "# llama\n" in card


@pytest.mark.parametrize("name", ["gpt2_tp2pp2", "llama_legacy_vpp", "m19_llama_tp2pp2"])
def test_what_megatron_saved_on_gpus_is_exported(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name)
    done = export(source, tmp_path / "out", with_tokenizer=False, dtype="float32")
    result = hf_tensors(tmp_path / "out")
    convert(source, tmp_path / "plain", to="hf")
    assert_same_tensors(result, {key: tensor.float() for key, tensor in hf_tensors(tmp_path / "plain").items()})
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| iteration | 10 of 10 |" in card
    assert done.checksum is not None


def test_the_command(small: Path, tmp_path: Path) -> None:
    ended = run("export", small, "--dry-run")
    assert ended.code == 0, ended.err
    assert ended.out.endswith("nothing written (--dry-run)\n")
    assert not (small / "hf").exists()
    ended = run("export", small, "--dtype", "bfloat16", "--metadata", "datasets=ada/stories", "--json")
    facts = json.loads(ended.out)
    assert facts["dtypes"] == ["bfloat16"]
    assert facts["tokenizer"]["size"] == 421
    assert set(facts["files"]) == {str(path.relative_to(facts["path"])) for path in Path(facts["path"]).rglob("*")}
    assert ModelCard.load(Path(facts["path"], "README.md")).data.datasets == "ada/stories"
    ended = run("export", small, tmp_path / "again")
    assert ended.out.splitlines()[0] == "llama  4 layers  226 k parameters  untied"
    assert ended.out.splitlines()[-1].endswith("every tensor read again and equal")
    assert verify(small / "checkpoints", tmp_path / "again").equal


def test_wrong_words_are_refused(small: Path, hf_checkpoint: HfMaker) -> None:
    with pytest.raises(ConvertError, match="has no use for --hf-config, --vocab-size"):
        export(hf_checkpoint("gpt2"), small / "out", hf_config=small, vocab_size=3)
    assert run("export", small, "--tokenizer", "t", "--no-tokenizer").code == 2
    assert run("export", small, "--watch").code == 2
    assert run("export", small, "--all", "--overwrite").code == 2
    assert run("export", small, "--dtype", "int8").code == 2
    ended = run("export", small, "--branch", "b")
    assert ended.err.splitlines()[1] == "hint: pass --push-to-hub"
    with pytest.raises(ConvertError, match="no dtype `int8`"):
        export(small, dtype="int8")
    assert run("export", small / "nowhere").err == f"error: `{small / 'nowhere'}` does not exist\n"
