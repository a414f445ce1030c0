"""The fuzzers for a few seconds, from fixed seeds; `make fuzz` runs them for as long as one likes."""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.publishing.tokenizer import read_tokenizer
from tests.fuzz.__main__ import case_of, cases_of
from tests.fuzz.checkpoints import COMMANDS, GOOD, Hung, Subject, alarm
from tests.fuzz.hostile import MARK, Executed, watched
from tests.fuzz.interruptions import Interruptions
from tests.fuzz.pushes import Pushes
from tests.fuzz.targets import TARGETS, attempt, scratch, seeds_of

CASES, CHECKPOINT_CASES = 30, 3


@pytest.mark.parametrize("target", TARGETS)
def test_a_parser_ends_well_or_with_a_refusal(target: str) -> None:
    assert all(attempt(target, seed) for seed in seeds_of(target))
    ends = {attempt(target, case_of(target, seed)) for seed in range(CASES)}
    assert False in ends or target in ("metrics", "attack")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_checkpoint_is_refused_or_unchanged(name: str) -> None:
    subject = Subject(name)
    cases = [subject.case(seed) for seed in range(CHECKPOINT_CASES)]
    assert [case for case in cases if case.kind not in GOOD] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*Interruptions.names, *Pushes.names])
def test_what_ends_early_is_whole_or_absent(name: str) -> None:
    subject = cases_of(name)
    cases = [subject.case(seed) for seed in range(2 * CHECKPOINT_CASES)]
    assert [case for case in cases if case.kind not in GOOD] == []


def test_the_fuzzer_sees_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would not find the worst of all: other weights, and a word for nothing."""
    subject = Subject("hf")
    at = subject.kept["model.safetensors"][0][0]
    file = subject.files["model.safetensors"]
    changed = {**subject.files, "model.safetensors": file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :]}
    monkeypatch.setattr("tests.fuzz.checkpoints.mutated_files", lambda *_: (changed, "a bit of a weight"))
    assert subject.case(0).kind == "CHANGED WITHOUT A WORD"


few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TEXT = st.text(st.sampled_from('ab.{}0"\\/\n\x00é😀\ud800'), max_size=9)
NUMBERS = st.one_of(st.integers(-2, 9), st.integers(), st.sampled_from([2**31, 2**63, 10**30]), st.none(), st.floats())
SCALARS = st.one_of(NUMBERS, TEXT, st.booleans())
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner), max_leaves=9)
SHAPES = st.one_of(st.lists(NUMBERS, max_size=4), ANY)


def with_odd_values(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Such an object, in which each field may have any value, or be missing."""
    return st.fixed_dictionaries({}, optional={name: value | ANY for name, value in fields.items()})


HEADERS = st.dictionaries(
    TEXT,
    with_odd_values(
        {"dtype": st.sampled_from(["F32", "BF16", "F8_E4M3"]), "shape": SHAPES, "data_offsets": st.lists(NUMBERS)}
    )
    | ANY,
    max_size=4,
)


@few
@given(HEADERS, st.binary(max_size=40))
def test_any_header(header: dict[str, Any], rest: bytes) -> None:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    attempt("safetensors", struct.pack("<Q", len(text)) + text + rest)


@few
@given(
    with_odd_values(
        {
            "zarr_format": st.just(2), "shape": SHAPES, "chunks": SHAPES, "dtype": st.sampled_from(["<f4", "bfloat16"]),
            "compressor": st.none(), "filters": st.none(), "order": st.just("C"), "dimension_separator": st.just("."),
        }
    )
)  # fmt: skip
def test_any_array_of_zarr(array: dict[str, Any]) -> None:
    attempt("zarray", json.dumps(array).encode())


@few
@given(st.dictionaries(TEXT, st.sampled_from(["model-00001-of-00002.safetensors", "../x", ""]) | ANY) | ANY)
def test_any_index(weight_map: Any) -> None:
    attempt("index", json.dumps({"weight_map": weight_map}).encode())


@few
@given(st.data())
def test_any_value_in_a_configuration(data: st.DataObject) -> None:
    config = json.loads(seeds_of("config")[0])
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[name] = data.draw(ANY)
    attempt("config", json.dumps(config).encode())


@few
@given(ANY | st.dictionaries(SCALARS | st.tuples(SCALARS, SCALARS), ANY), st.integers(0, 5))
def test_any_value_in_a_pickle(value: Any, protocol: int) -> None:
    attempt("pickle", pickle.dumps(value, protocol))


@few
@given(st.lists(st.sampled_from([opcode.code.encode("latin-1") for opcode in pickletools.opcodes])
                | st.binary(max_size=4), max_size=30))  # fmt: skip
def test_any_opcodes(parts: list[bytes]) -> None:
    attempt("pickle", b"".join(parts) + b".")


@pytest.mark.parametrize(
    "content",
    [b"\n\x02\x18\x03", b"\n\x00", b"\n" + b"\x80" * 1000, b"\n" + b"\xff" * 100_000],
    ids=["a piece without text", "an empty piece", "a long number", "a longer one"],
)
def test_a_damaged_vocabulary(content: bytes) -> None:
    place = scratch().file("damaged/tokenizer.model", content).parent
    with pytest.raises(UnreadableCheckpoint, match="the tokenizer in"):
        read_tokenizer(place)


class Calls:
    """Pickled as a call of any function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("call", [Calls(exec, "pass"), Calls(open, MARK, "w")], ids=["exec", "open"])
def test_the_fuzzer_sees_code_that_runs(call: Calls) -> None:
    """Another unpickler would run it."""
    folder = scratch().path / "watched"
    folder.mkdir(exist_ok=True)
    with pytest.raises(Executed), watched(folder):
        pickle.loads(pickle.dumps(call)).close()


def test_a_case_that_works_for_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.checkpoints.SLOW", 0.05)
    start = time.process_time()
    with alarm():
        time.sleep(0.1)  # which is no work
    with pytest.raises(Hung), alarm():
        _work(until=start + 9)
    assert time.process_time() - start < 5


def _work(until: float) -> None:
    while time.process_time() < until:
        pass
