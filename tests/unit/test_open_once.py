"""Each header of a source is parsed once in a command, and its weights are looked up once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from benchmarks.checkpoints import make_llama
from benchmarks.ranks import make_ranks
from mcore_convert import convert, diff, export, export_all, inspect, iter_hf_weights, push, reshard, verify
from mcore_convert.checkpoints import weights
from mcore_convert.comparison import logits
from mcore_convert.spec import Layout
from mcore_convert.storage import remote
from tests.hub import client_of_a_hub
from tests.oracle.test_benchmarks import SMALL

Run = Callable[[Path, Path], object]
RUNS: dict[str, Run] = {
    "to hf": lambda source, out: convert(source, out, to="hf"),
    "to torch_dist": lambda source, out: convert(source, out, to="torch_dist", tp=2),
    "to torch": lambda source, out: convert(source, out, to="torch", pp=2),
    "reshard": lambda source, out: reshard(source, out, tp=2),
    "export": lambda source, out: export(source, out, with_tokenizer=False),
    "export to the Hub": lambda source, out: export(source, push_to_hub="model", with_tokenizer=False),
    "export_all": lambda source, out: [*export_all(source, out, with_tokenizer=False)],
    "push": lambda source, out: push(source, "model", dry_run=True),
    "dry run": lambda source, out: convert(source, out, to="torch_dist", tp=2, dry_run=True),
    "inspect": lambda source, out: inspect(source, stats=True, optimizer=True),
    "page": lambda source, out: inspect(source, planned=Layout(tp=2), html=out.with_suffix(".html")),
    "verify": lambda source, out: verify(source, source.parent / "same"),
    "verify --logits": lambda source, out: verify(source, source.parent / "same", logits=True),
    "diff": lambda source, out: diff(source, source.parent / "same", optimizer=True),
    "iter_hf_weights": lambda source, out: [*iter_hf_weights(source)],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in three formats, those of Megatron with optimizer state; a directory `same` beside each is equal."""
    folder = tmp_path_factory.mktemp("sources")
    hf = make_llama(folder / "hf/model", SMALL)
    (folder / "hf/same").symlink_to(hf)
    ranks = make_ranks(folder / "torch/run", SMALL, Layout(tp=2, pp=2))
    reshard(ranks, folder / "torch/same")
    reshard(ranks, folder / "torch_dist/run", to="torch_dist", tp=2)
    reshard(ranks, folder / "torch_dist/same", to="torch_dist")
    return {"hf": hf, "torch": ranks, "torch_dist": folder / "torch_dist/run"}


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with client_of_a_hub(tmp_path_factory.mktemp("home")):
        yield


def read_weights(model: Any, sources: Any, *_: Any) -> torch.Tensor:
    """Read the weights as a model would be given them, without the model."""
    assert [*logits.tensors_of(model, sources)]
    return torch.zeros(1)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("format_", ["hf", "torch_dist", "torch"])
def test_headers_are_parsed_once(
    format_: str,
    run: str,
    sources: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (format_ == "hf" and run in ("reshard", "to hf", "export_all")) or (format_ != "hf" and run == "push"):
        pytest.skip("there is no such conversion, or it is another that is here")
    lookups: Counter[Path] = Counter()
    refuse = weights._refuse

    def counted(family: Any, source: Any, *rest: Any) -> None:
        lookups[source.path] += 1
        refuse(family, source, *rest)

    monkeypatch.setattr(weights, "_refuse", counted)
    monkeypatch.setattr(logits, "run", read_weights)
    source = sources[format_]
    with caplog.at_level(logging.DEBUG, "mcore_convert"):
        RUNS[run](source, tmp_path / "out")
    messages = [record.getMessage() for record in caplog.records]
    headers = Counter(text for text in messages if "for its header" in text and f"{source.parent}/" in text)
    files = {text.split(" for its header")[0].removeprefix("opened ") for text in headers}
    named = [path for path in sorted(source.rglob("*")) if path.suffix in (".safetensors", ".pt", ".distcp")]
    assert {str(path) for path in named if path.name != "common.pt"} <= files  # the count sees every file
    assert {text: count for text, count in headers.items() if count > 1} == {}
    assert set(lookups.values()) == (set() if run == "push" else {1}), lookups


def test_a_remote_source_is_looked_up_once(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").put(f"{sources['hf']}/", "/once", recursive=True)
    stores = []
    kind = remote._Store

    def counted(fs: Any) -> Any:
        stores.append(fs)
        return kind(fs)

    monkeypatch.setattr(remote, "_Store", counted)
    convert("memory://once", tmp_path / "out", dry_run=True)
    assert len(stores) == 1
