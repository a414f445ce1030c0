"""Pushing to a Hub on this machine, which speaks the Hub's protocol to the real client."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants

from fixtures.hub import Fault, Hub, Token
from fixtures.hub.store import File
from mcore_convert import Upload, convert, export, push
from mcore_convert.errors import ConvertError, HubError, UnreadableCheckpoint, UnwritableTarget
from tests.conftest import HfMaker
from tests.hub import client_of_a_hub, run_with, started_with
from tests.refusals import run

REPO = "ada/model"
WEIGHTS = "model.safetensors"
PUT = "PUT .*"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_a_hub(tmp_path) as result:
        yield result


@pytest.fixture
def model(tmp_path: Path, hf_checkpoint: HfMaker) -> Path:
    """An exported Llama in three files of weights."""
    path = tmp_path / "model"
    export(hf_checkpoint("llama-gqa", fill="normal"), path, max_shard_size=400_000)
    assert len(list(path.glob("model-*.safetensors"))) == 3
    return path


def files_in(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def files_on(hub: Hub, revision: str = "main", repo: str = REPO) -> dict[str, bytes]:
    files = hub.repositories[repo].at(revision).files
    return {path: file.content for path, file in files.items() if path != ".gitattributes"}


def asked(hub: Hub, pattern: str) -> list[str]:
    return [request for request in hub.requests if pattern in request]


def test_a_model_arrives_as_it_is(hub: Hub, model: Path) -> None:
    done = push(model, "model", private=True)
    assert files_on(hub) == files_in(model)
    assert (done.repo, done.url, done.created) == (REPO, f"{hub.url}/{REPO}", True)
    assert done.commit == hub.repositories[REPO].at("main").oid
    assert done.sent == {name: len(content) for name, content in files_in(model).items()}
    assert hub.repositories[REPO].private
    assert [commit.title for commit in hub.repositories[REPO].commits("main")] == [
        "Upload model with mcore-convert",
        "initial commit",
    ]
    large = sorted(file.stat().st_size for file in model.glob("*.safetensors"))
    assert sum(hub.sent) == sum(large)
    assert max(hub.sent) == hub.part  # the larger ones came in parts


def test_what_is_there_is_not_sent_again(hub: Hub, model: Path) -> None:
    push(model, REPO)
    hub.sent.clear()
    hub.requests.clear()
    again = push(model, REPO)
    assert (again.sent, again.removed, again.commit, again.created) == ({}, (), None, False)
    assert set(again.kept) == set(files_in(model))
    assert hub.sent == []
    assert not asked(hub, "POST")
    assert len(hub.repositories[REPO].commits("main")) == 2
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Another card\n")
    assert push(model, REPO).sent == {"README.md": (model / "README.md").stat().st_size}
    assert files_on(hub) == files_in(model)
    assert hub.sent == []


def test_what_would_be_loaded_instead_is_removed(hub: Hub, model: Path, tmp_path: Path) -> None:
    """transformers prefers `model.safetensors` to an index, and `tokenizer.json` to other forms."""
    push(model, REPO)
    export(model, tmp_path / "whole")
    (tmp_path / "whole" / "chat_template.jinja").unlink()
    done = push(tmp_path / "whole", REPO)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert done.removed == ("chat_template.jinja", *shards, "model.safetensors.index.json")
    assert files_on(hub) == files_in(tmp_path / "whole")
    files = dict(hub.repositories[REPO].branches["main"].files)
    shutil.rmtree(tmp_path / "whole")
    export(model, tmp_path / "whole", with_tokenizer=False)
    assert push(tmp_path / "whole", REPO).removed == ()  # a tokenizer that is there may be the right one
    assert hub.repositories[REPO].at("main").files.keys() == files.keys()


def test_a_branch_begins_empty_and_gets_a_tag(hub: Hub, model: Path, tmp_path: Path) -> None:
    push(model, REPO)
    hub.sent.clear()
    done = push(model, REPO, branch="step/100", tag="v1", commit_message="Step 100")
    assert done.url == f"{hub.url}/{REPO}/tree/step/100"
    repository = hub.repositories[REPO]
    assert [commit.title for commit in repository.commits("step/100")] == ["Step 100", "initial commit"]
    assert repository.tags["v1"] == repository.branches["step/100"]
    assert hub.sent == []  # its large files are there, of another branch
    assert push(model, REPO, branch="step/100", tag="v1").commit is None
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    hub.requests.clear()
    with pytest.raises(HubError) as refused:
        push(model, REPO, branch="step/100", tag="v1")
    assert refused.value.message == f"`{REPO}` has a tag `v1` already, of another commit"
    assert refused.value.hint == f"choose another tag, or remove it: hf repos tag delete {REPO} v1"
    with pytest.raises(HubError, match="has a tag `v1` already"):
        push(model, REPO, branch="other", tag="v1")
    assert not asked(hub, "POST")
    assert set(repository.branches) == {"main", "step/100"}


def test_a_dry_run_changes_nothing(hub: Hub, model: Path) -> None:
    hub.tokens["hf_ada"] = Token("ada", "read")
    planned = push(model, "model", dry_run=True)
    assert (planned.repo, planned.created, planned.commit) == (REPO, True, None)
    assert set(planned.sent) == set(files_in(model))
    assert hub.repositories == {}
    hub.tokens["hf_ada"] = Token("ada")
    push(model, REPO)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    planned = push(model, REPO, dry_run=True, branch="other")
    assert set(planned.sent) == set(files_in(model))
    assert set(push(model, REPO, dry_run=True).sent) == {"config.json"}
    assert set(hub.repositories[REPO].branches) == {"main"}


def refusal(model: Path, repo: str = REPO, **options: str) -> str:
    with pytest.raises(HubError) as refused:
        push(model, repo, **options)  # type: ignore[arg-type]
    return str(refused.value)


WRITE = "hint: make a token with the role write at https://huggingface.co/settings/tokens, then `hf auth login`"


def test_a_token_that_will_not_do_is_refused_before_anything_is_sent(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.tokens["hf_ada"] = Token("ada", "read")
    assert refusal(model) == f"the token `ada's token` of `ada` can only read\n{WRITE}"
    hub.tokens["hf_ada"] = Token("ada", expired=True)
    assert refusal(model) == (
        "the Hub does not accept the token: it is invalid, or its time is up\n"
        f"  it is that of HF_TOKEN, which goes before that of `hf auth login`\n{WRITE}"
    )
    monkeypatch.delenv("HF_TOKEN")
    assert refusal(model) == f"there is no token for the Hub\n{WRITE}, or set HF_TOKEN"
    Path(constants.HF_TOKEN_PATH).write_text("hf_gone")
    assert refusal(model).splitlines()[1] == "  it is that of `hf auth login`"
    assert hub.repositories == {}
    assert not asked(hub, "POST")


def test_a_name_that_is_taken_or_no_name(hub: Hub, model: Path) -> None:
    hub.tokens["hf_bob"] = Token("bob")
    hub.create("bob/model")
    words = "hint: a token needs write access to the repository's owner, see https://huggingface.co/settings/tokens; "
    assert refusal(model, "bob/model").splitlines()[1].startswith(words)
    assert refusal(model, "bob/other").splitlines()[0] == (
        '`bob/other` cannot be written: You don\'t have the rights to create a model under the namespace "bob"'
    )
    assert list(hub.repositories) == ["bob/model"]
    hub.organisations["lab"] = {"ada"}
    assert push(model, "lab/model").created
    assert refusal(model, "a/b/c").endswith("hint: a repository is called NAME or OWNER/NAME")
    hub.faults.append(Fault("POST /api/repos/create", 409, "a Space of that name exists"))
    hub.faults.append(Fault("GET /api/models/ada/model/refs", 404, "none", times=3))
    assert refusal(model).splitlines()[0] == "`ada/model` cannot be written: none"


def test_a_connection_that_is_lost_once_is_no_matter(hub: Hub, model: Path) -> None:
    hub.faults += [Fault(PUT, after=1000), Fault("POST .*/batch"), Fault("POST .*/commit/main", late=True)]
    done = push(model, REPO)
    assert files_on(hub) == files_in(model)
    assert len(hub.repositories[REPO].commits("main")) == 2  # the one whose answer was lost was not made twice
    assert done.repo == REPO


def test_an_upload_goes_on_where_it_was_cut(hub: Hub, model: Path) -> None:
    """Two of three large files arrive, then the line is dead; the next call sends the third alone."""
    sizes = {file.name: file.stat().st_size for file in model.glob("*.safetensors")}
    hub.part = 10**9
    digest = sha256_of(model / "model-00002-of-00003.safetensors")
    hub.faults.append(Fault(f"PUT /_lfs/{digest}", after=5000, times=1000))
    reasons = refusal(model)
    assert reasons.startswith(f"`{REPO}` cannot be written: the connection to the Hub was lost: ")
    assert reasons.endswith("hint: run the same command again: what has arrived is not sent twice")
    assert sorted(hub.sent) == sorted(size for name, size in sizes.items() if "00002" not in name)
    assert files_on(hub) == {}
    hub.faults.clear()
    hub.sent.clear()
    push(model, REPO)
    assert hub.sent == [sizes["model-00002-of-00003.safetensors"]]
    assert files_on(hub) == files_in(model)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_change_by_someone_else_is_seen(hub: Hub, model: Path) -> None:
    """A commit that comes in between is not undone: what is there is looked at again."""
    repository = hub.create(REPO)
    other = files_of_another(hub)

    def commit() -> None:
        repository.add("main", "mine", {**repository.at("main").files, **other}, None)

    hub.faults.append(Fault("POST .*/commit/main", 412, "A commit has happened since", then=commit))
    done = push(model, REPO)
    assert done.removed == ("pytorch_model.bin",)
    titles = [commit.title for commit in repository.commits("main")]
    assert titles == ["Upload model with mcore-convert", "mine", "initial commit"]
    assert files_on(hub) == {**files_in(model), "notes.txt": b"hello"}


def files_of_another(hub: Hub) -> Mapping[str, File]:
    hub.objects["0" * 64] = b"weights"
    return {"pytorch_model.bin": File.large(b"weights"), "notes.txt": File.regular(b"hello")}


def test_a_hub_that_fails_is_reported(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = "hint: run the same command again: what has arrived is not sent twice"
    hub.faults.append(Fault("POST .*/commit/main", 500, "no disk", times=3))
    assert refusal(model) == f"`{REPO}` cannot be written: the Hub fails with 500: no disk\n{again}"
    hub.faults.append(Fault("POST .*/commit/main", 429, times=3))
    assert "too many requests\nhint: wait some minutes" in refusal(model)
    (model / "README.md").write_text("---\nlicense: [\n---\n")
    message = f"`{REPO}` cannot be written: Invalid metadata in README.md.\n  - while parsing a flow node"
    assert refusal(model) == message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert refusal(model).startswith("the token cannot be checked: the connection to the Hub was lost: ")


def test_only_a_whole_model_is_sent(hub: Hub, model: Path, tmp_path: Path) -> None:
    (model / ".cache").mkdir()
    (model / ".cache" / "secret").write_text("mine")
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UnreadableCheckpoint, match="names files that are not there"):
        push(model, REPO)
    with pytest.raises(UnreadableCheckpoint, match="does not exist"):
        push(tmp_path / "nowhere", REPO)
    assert hub.requests == []


def test_hidden_files_and_other_models_stay(hub: Hub, model: Path) -> None:
    before = files_in(model)
    (model / ".cache").mkdir()
    (model / ".cache" / "secret").write_text("mine")
    export(model, model.parent / "other")
    shutil.move(model.parent / "other", model / "iter_0000100")
    push(model, REPO)
    assert files_on(hub) == before


def test_what_shall_be_private_does_not_become_public(hub: Hub, model: Path) -> None:
    hub.create(REPO)
    with pytest.raises(HubError, match="is there already, and is public"):
        push(model, REPO, private=True)
    assert files_on(hub) == {}
    hub.repositories[REPO].private = True
    assert push(model, REPO, private=True).commit


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_an_upload(hub: Hub, model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Nothing but Ctrl-C is known to the client; whatever signal it is, the upload ends, and goes on when run again."""
    hub.faults.append(Fault("POST .*/preupload/main", then=lambda: os.kill(process.pid, number), late=True))
    code = "import sys; from mcore_convert.cli import main; main(sys.argv[1:])"
    process = started_with(hub, tmp_path / "home", "-c", code, "push", model, REPO)
    _, messages = process.communicate(timeout=60)
    assert (process.returncode, messages) == (
        128 + number,
        "interrupted; run it again: what has arrived is not sent twice\n",
    )
    assert files_on(hub) == {}
    assert push(model, REPO).commit


@pytest.fixture
def megatron(tmp_path: Path, hf_checkpoint: HfMaker) -> Path:
    convert(hf_checkpoint("gpt2", fill="normal"), tmp_path / "megatron", tp=2)
    return tmp_path / "megatron"


def test_a_megatron_checkpoint_is_exported_on_its_way(hub: Hub, megatron: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    planned = push(megatron, "model", dry_run=True)
    assert hub.repositories == {}
    done = push(megatron, "model")
    assert done.sent == planned.sent
    export(megatron, tmp_path / "exported")
    there = files_on(hub)
    assert f'model="{REPO}")'.encode() in there.pop("README.md")
    wanted = files_in(tmp_path / "exported")
    wanted.pop("README.md")
    assert there == wanted
    assert push(megatron, REPO).commit is None  # the same export again
    assert set(tmp_path.iterdir()) - before == {tmp_path / "exported"}


def test_export_and_push_in_one(hub: Hub, megatron: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("POST .*/commit/main", 500, times=3))
    with pytest.raises(HubError) as refused:
        export(megatron, tmp_path / "kept", push_to_hub="model")
    hint = f"the export is in `{tmp_path / 'kept'}`: go on with `mcore-convert push {tmp_path / 'kept'} {REPO}`"
    assert refused.value.hint is not None
    assert refused.value.hint.endswith(hint)
    assert isinstance(push(tmp_path / "kept", REPO), Upload)
    assert files_on(hub) == files_in(tmp_path / "kept")
    done = export(megatron, push_to_hub=REPO, branch="half", dtype="bfloat16", tag="v2")
    assert done.path is None
    assert done.upload is not None
    assert json.loads(files_on(hub, "v2")["config.json"])["torch_dtype"] == "bfloat16"
    assert f'model="{REPO}", revision="half")'.encode() in files_on(hub, "half")["README.md"]
    planned = export(megatron, push_to_hub=REPO, dry_run=True)
    assert (planned.upload, planned.dry_run) == (None, True)
    assert not (tmp_path / "megatron-hf").exists()


def test_the_command_shows_what_it_sends(hub: Hub, model: Path) -> None:
    ended = run("push", model, "model", "--dry-run")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == f"to  {hub.url}/{REPO}  a new repository"
    assert lines[1].split()[:2] == ["send", "README.md"]
    assert lines[-1].endswith("files to send, nothing sent (--dry-run)")
    assert run("push", model, "model").out.splitlines()[-1].startswith("943 kB in 11 files sent, commit ")
    assert run("push", model, "model").out.splitlines()[-1] == "everything is there already"
    facts = json.loads(run("push", model, "model", "--json", "--tag", "v1").out)
    assert (facts["commit"], facts["tag"], facts["sent"]) == (None, "v1", {})
    hub.tokens.clear()
    assert run("push", model, "model", "--branch", "b").code == 1


LOADS = """
import sys
import torch
from transformers import AutoModelForCausalLM, pipeline
from mcore_convert import convert, export, load_hf_model, verify

local, folder = sys.argv[1:]
for revision in ("main", "half"):
    there = AutoModelForCausalLM.from_pretrained("ada/model", revision=revision)
    here = AutoModelForCausalLM.from_pretrained(local)
    assert all(torch.equal(a, b) for a, b in zip(there.state_dict().values(), here.state_dict().values(), strict=True))
said = pipeline("text-generation", model="ada/model")("Once upon a time", max_new_tokens=5, do_sample=False)
assert said == pipeline("text-generation", model=local)("Once upon a time", max_new_tokens=5, do_sample=False)
convert("ada/model", f"{folder}/megatron")
assert verify(local, f"{folder}/megatron").equal
export(local, f"{folder}/again", tokenizer="ada/model")
assert load_hf_model("ada/model").config.vocab_size == here.config.vocab_size
"""


def test_the_repository_is_a_model_for_everybody(hub: Hub, model: Path, tmp_path: Path) -> None:
    """What was pushed is what `from_pretrained(REPO)`, a pipeline and our own commands find there."""
    push(model, REPO, private=True)
    push(model, REPO, branch="half")
    done = run_with(hub, tmp_path / "home", "-c", LOADS, model, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_is_reported(hub: Hub, model: Path, tmp_path: Path) -> None:
    push(model, REPO)
    (tmp_path / "file").write_text("no directory")
    code = "import sys; from mcore_convert.cli import main; main(sys.argv[1:])"
    done = run_with(hub, tmp_path / "file", "-c", code, "convert", REPO, tmp_path / "out")
    assert done.returncode == 1
    message, hint = done.stderr.splitlines()[-2:]
    assert message.startswith(f"error: cannot download `{REPO}`: `{tmp_path / 'file'}")
    assert hint.startswith("hint: HF_HOME names the directory for downloads")


def test_offline_means_offline(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConvertError, match="HF_HUB_OFFLINE is set"):
        push(model, REPO)


def test_an_unwritable_place_for_an_export_is_reported(tmp_path: Path, hf_checkpoint: HfMaker) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(UnwritableTarget, match="cannot write"):
        export(hf_checkpoint("gpt2"), tmp_path / "file" / "out")
