"""The configuration of training runs: composed, overridden, checked, printed; ready choices are what they say."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_convert.checkpoints.families import of_arguments
from mcore_convert.errors import ConfigError
from mcore_convert.spec import gpt
from mcore_convert.spec.config.arguments import normalise
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.shard import Box
from tests.unit.test_cli import run
from train_entry.arguments import megatron_arguments
from train_entry.config.compose import as_yaml, load_config
from train_entry.config.files import CONFIGS, choices, ready_runs, title
from train_entry.config.nearest import groups, keys
from train_entry.config.schema import Config, Data, Logging

# Published, or counted from the published shape: GPT-2's report and its checkpoints, the model cards of Llama.
PARAMETERS = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-857m": 355_871_744,  # GPT-2 medium with another 1024 positions of 1024
    "llama3.2-1b": 1_235_814_400,
    "llama2-7b": 6_738_415_616,
}


def refusal(*arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)
    return caught.value


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# ready choices


@pytest.mark.parametrize("name", ready_runs())
def test_a_ready_run_selects_one_of_each_group(name: str) -> None:
    defaults = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["defaults"]
    assert [next(iter(each)) if isinstance(each, dict) else each for each in defaults] == [*groups(), "_self_"]
    config = load_config(name)
    assert config.run_dir == Path("runs", name)
    assert config.training.precision == ("fp32" if name.startswith("tiny") else "bf16")


def test_every_choice_is_one_and_says_what_it_is() -> None:
    """Each run here takes the next choice of every group, so that few runs take all of them."""
    left = {group: choices(group) for group in groups()}
    while any(left.values()):
        selected = {group: names.pop() for group, names in left.items() if names}
        needed = ["schedule.wsd_decay_steps=10"] if selected.get("schedule") == "wsd" else []
        config = load_config("tiny-gpt2", [*(f"{group}={name}" for group, name in selected.items()), *needed])
        for group, name in selected.items():
            assert len(title(CONFIGS / group / f"{name}.yaml")) > 10, f"{group}={name} begins with no comment"
        if "parallel" in selected:
            sizes = ("tp", "pp", "vpp", "cp", "ep")
            named = dict(re.findall(r"(tp|pp|vpp|cp|ep)(\d+)", selected["parallel"]))
            experts = "ep" in named  # Megatron Core trains experts at TP with sequence parallelism alone
            assert [getattr(config.parallel, size) or 1 for size in sizes] == [int(named.get(s, 1)) for s in sizes]
            expected = selected["parallel"].endswith("-sp") or (experts and "tp" in named)
            assert config.parallel.sequence_parallel == expected


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_its_published_number_of_parameters(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    args = normalise(megatron_arguments(load_config("tiny-gpt2", [f"model={name}"]), None))
    hf = of_arguments(args).config.to_hf(args)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    assert model.num_parameters() == PARAMETERS[name]
    dims = Dims.of(args, vocab_size=args["vocab_size"], padded_vocab_size=args["padded_vocab_size"])
    family = gpt.family(args)
    assert (
        sum(Box.whole(family.shape(*each)).numel for each in ((w, dims) for w, _ in family.instances(dims)))
        == (PARAMETERS[name])
    )


def test_models_are_the_published_ones_in_what_no_count_shows() -> None:
    from transformers import GPT2Config

    def hf_of(name: str) -> dict[str, Any]:
        args = normalise(megatron_arguments(load_config("tiny-gpt2", [f"model={name}"]), None))
        return of_arguments(args).config.to_hf(args)

    small, published = hf_of("gpt2-small"), GPT2Config().to_dict()
    dropout = {"resid_pdrop", "embd_pdrop", "attn_pdrop"}  # left out, and said so
    others = {"bos_token_id", "eos_token_id", "architectures", "dtype"}  # no matter of the shape
    assert {key for key in small if key in published and small[key] != published[key]} <= dropout | others
    llama3, llama2 = hf_of("llama3.2-1b"), hf_of("llama2-7b")
    assert (llama3["rope_theta"], llama3["rope_scaling"]["factor"], llama3["rms_norm_eps"]) == (500000.0, 32.0, 1e-5)
    assert (llama3["num_key_value_heads"], llama3["head_dim"], llama3["tie_word_embeddings"]) == (8, 64, True)
    assert (llama2["rope_theta"], llama2["rope_scaling"], llama2["rms_norm_eps"]) == (10000.0, None, 1e-5)
    assert (llama2["num_key_value_heads"], llama2["max_position_embeddings"]) == (32, 4096)


def test_titles_say_the_true_number_of_parameters() -> None:
    from mcore_convert.cli.terminal import in_parameters

    for name in choices("model"):
        matched = re.search(r"([\d.]+ [MB]) parameters", title(CONFIGS / "model" / f"{name}.yaml"))
        if matched and name in PARAMETERS:
            assert matched[1] == in_parameters(PARAMETERS[name])


# files


def test_the_flag_for_an_export() -> None:
    """It stands anywhere among the words, and a later word goes over it, as over any."""
    assert load_config("tiny-gpt2").checkpoint.export_hf == "never"
    assert load_config("tiny-gpt2", ["--export-hf", "training.steps=3"]).checkpoint.export_hf == "end"
    assert load_config("tiny-gpt2", ["--export-hf", "checkpoint.export_hf=each"]).checkpoint.export_hf == "each"


def test_a_run_anywhere_on_disk_inherits_and_overrides(tmp_path: Path) -> None:
    source = write(
        tmp_path / "it's here" / "mine.yaml",
        "defaults: [tiny-gpt2, {override parallel: tp2-pp2}, _self_]\ntraining: {steps: 7}\noptimizer: {lr: 2e-3}\n",
    )
    config, parent = load_config(source), load_config("tiny-gpt2")
    assert (config.parallel.tp, config.parallel.pp, config.training.steps, config.optimizer.lr) == (2, 2, 7, 2e-3)
    assert config.model == parent.model
    assert config.optimizer.min_lr == parent.optimizer.min_lr  # what the parent's own file sets


def test_choices_beside_the_users_file_are_found_and_may_build_on_ours(tmp_path: Path) -> None:
    write(tmp_path / "model" / "wide.yaml", "defaults: [tiny-llama, _self_]\nhidden_size: 256\n")
    source = write(tmp_path / "mine.yaml", "defaults: [tiny-llama, {override model: wide}, _self_]\n")
    model = load_config(source).model
    assert (model.hidden_size, model.num_query_groups) == (256, 2)
    other = write(tmp_path / "other.yaml", "defaults: [mine, {override parallel: tp2}]\n")
    assert load_config(other, ["training.seed=3"]).model.hidden_size == 256
    assert load_config(other, ["model=tiny-gpt2"]).model.hidden_size == 128


def test_a_file_without_selections_is_a_run_too(tmp_path: Path) -> None:
    source = write(tmp_path / "bare.yaml", "training:\n  steps: 3\nmodel:\n")
    assert load_config(source) == Config().with_values(training={"steps": 3})
    assert load_config(source, ["parallel=tp2", "parallel.pp=2"]).parallel.tp == 2
    assert load_config(write(tmp_path / "empty.yaml", "")) == Config()


def test_references_see_all_values(tmp_path: Path) -> None:
    source = write(
        tmp_path / "mine.yaml",
        "defaults: [tiny-gpt2, _self_]\nrun_dir: runs/${training.seed}\nschedule: {decay_steps: '${training.steps}'}\n",
    )
    config = load_config(source, ["training.steps=9", "data.paths=['${run_dir}/x']"])
    assert (config.schedule.decay_steps, config.run_dir) == (9, Path("runs/1234"))
    assert config.data.paths == ("runs/1234/x",)


def test_hydra_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase
    from packaging.version import Version

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(VersionBase.instance(), "version_base", Version("1.2"))  # hydra's own, for a whole process
    before = GlobalHydra.instance().hydra
    first = load_config("tiny-gpt2", ["parallel=tp2"])
    assert load_config("tiny-gpt2", ["parallel=tp2"]) == first
    assert VersionBase.instance().getbase() == Version("1.2")
    assert GlobalHydra.instance().hydra is before
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_callers_own_hydra_goes_on(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    write(tmp_path / "theirs.yaml", "a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        load_config("tiny-gpt2")
        assert compose("theirs") == {"a": 1}


# values


def other_value(key: str) -> tuple[str, Any]:
    """Return a valid value of a key that is not its default, as a command line spells it and as it is."""
    group, _, name = key.rpartition(".")
    owner: Any = getattr(Config(), group) if group else Config()
    annotation, default = type(owner).model_fields[name].annotation, getattr(owner, name)
    kinds = [part for part in get_args(annotation) if part is not type(None)] or [annotation]
    text = repr(annotation)
    if get_origin(kinds[0]) is Literal or get_origin(annotation) is Literal:
        words = get_args(annotation) if get_origin(annotation) is Literal else get_args(kinds[0])
        chosen = next(word for word in words if word != default)
        return chosen, chosen
    if get_origin(annotation) is tuple:
        return ("[1.5,2]", (1.5, 2.0)) if "float" in text else ("[a/b,'c d']", ("a/b", "c d"))
    if "bool" in text:
        return ("false", False) if default else ("true", True)
    if "float" in text:
        return "0.125", 0.125
    if "int" in text:
        return "3", 3
    return ("x y/z,1", Path("x y/z,1")) if "Path" in text else ("x y,1", "x y,1")


def test_the_command_line_sets_every_key(tmp_path: Path) -> None:
    """Also those that no file mentions."""
    wanted = {key: other_value(key) for key in keys()}
    config = load_config(
        write(tmp_path / "bare.yaml", ""), [f"{key}={spelled}" for key, (spelled, _) in wanted.items()]
    )
    for key, (_, value) in wanted.items():
        group, _, name = key.rpartition(".")
        default = getattr(getattr(Config(), group) if group else Config(), name)
        assert getattr(getattr(config, group) if group else config, name) == value != default, key


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("data.paths=[a,b]", ("data", "paths"), ("a", "b")),
        ("data.paths=['~/a b']", ("data", "paths"), (str(Path.home() / "a b"),)),
        ("data.split=98,1,1", ("data", "split"), "98,1,1"),
        ("data.split='98,1,1'", ("data", "split"), "98,1,1"),
        ("logging.wandb_name=2024", ("logging", "wandb_name"), "2024"),
        ("logging.wandb_name=null", ("logging", "wandb_name"), None),
        ("logging.wandb_name='null'", ("logging", "wandb_name"), "null"),
        ("checkpoint.init=~/model", ("checkpoint", "init"), str(Path.home() / "model")),
        ("training.steps=1e3", ("training", "steps"), 1000),
        ("++training.steps=4", ("training", "steps"), 4),
        ("~optimizer.lr", ("optimizer", "lr"), Config().optimizer.lr),
        ("parallel={tp: 2, pp: 3}", ("parallel", "pp"), 3),
        ("model=null", ("model", "num_layers"), None),
    ],
)
def test_a_value_reads_as_in_hydra(override: str, field: tuple[str, str], value: Any) -> None:
    config = load_config("tiny-gpt2", [override])
    assert getattr(getattr(config, field[0]), field[1]) == value


def test_a_directory_that_a_run_left_is_its_configuration(tmp_path: Path) -> None:
    config = load_config("tiny-llama", ["training.steps=5"])
    write(tmp_path / "config.yaml", as_yaml(config))
    assert load_config(str(tmp_path)) == config


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"))).filter(
    lambda text: text != "???" and not text.startswith("~")
)


@settings(max_examples=15, deadline=None)
@given(name=texts, paths=st.lists(texts, max_size=2), lr=st.floats(1e-30, 1e30), steps=st.integers(1, 10**12))
@example("${training.steps}", ["\\${a}", "\\\\${b}", "${"], 1e-5, 1)
@example("1e-5", ["null", "yes", "- a", "a: b", "'", '"'], 3e-4, 2)
def test_what_is_printed_reads_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, paths: list[str], lr: float, steps: int
) -> None:
    config = Config(
        data=Data(paths=tuple(paths), weights=(lr,)), logging=Logging(wandb_name=name, wandb_project=name)
    ).with_values(optimizer={"lr": lr}, training={"steps": steps})
    source = write(tmp_path_factory.getbasetemp() / "printed.yaml", as_yaml(config))
    assert load_config(source) == config


# the command


def test_the_listing_has_every_run_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "train", "--list")
    assert (code, err) == (0, "")
    rows = [line.split("  ")[0 if not line.startswith(" ") else 1] for line in out.splitlines()]
    expected = ["runs", *ready_runs()]
    for group in groups():
        expected += [f"{group}=", *choices(group)]
    assert rows == expected


def test_the_printed_configuration_is_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "train", "tiny-gpt2", "parallel=tp2", "training.steps=4", "--print-config")
    assert (code, err) == (0, "")
    assert load_config(write(tmp_path / "printed.yaml", out)) == load_config(
        "tiny-gpt2", ["parallel=tp2", "training.steps=4"]
    )


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "train", "tiny-gpt2", "lr=3", "--print-config")
    assert (code, out) == (1, "")
    assert err.startswith("error: there is no `lr`; did you mean `optimizer.lr`?")
    assert run(capsys, "train")[0] == 2


def test_a_dry_run_says_sizes_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "train", "gpt3-857m", "data=mock", "--dry-run", "--ranks", "8")
    assert code == 0
    assert "356 M parameters" in out
    assert "dp 8, 8 ranks: torchrun --nproc-per-node 8 -m train_entry CONFIG" in out
    assert "524 k tokens in all" in out
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    code, _, err = run(capsys, "train", "tiny-gpt2", "parallel=tp2-pp2", "--dry-run", "--ranks", "6")
    assert code == 1
    assert "torchrun --nproc-per-node 4" in err
