"""Data for fine-tuning: what is learned of examples, packs, epochs, and examples that are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from fixtures.tokenizer import CHAT_TEMPLATE, END, stories
from mcore_convert.errors import DataError
from tests.train.test_data_sets import Line, config_of, equal, provided
from train_entry.data.microbatches import Samples
from train_entry.data.sft import Sft
from train_entry.data.sft_tokens import examples_of
from train_entry.data.tokenizer import Tokenizer, load_tokenizer

# Fine-tuning

PROMPTS: list[Line] = [
    {
        "prompt": f"Question {number}:{' why' * (number % 6)}",
        "completion": f" Because{' so' * (number % 4)}.",
        "id": number,
    }
    for number in range(11)
]


CHATS: list[Line] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}]},
    {
        "messages": [
            {"role": "system", "content": "Be kind. 🦆"},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three?"},
            {"role": "assistant", "content": " Four\n"},
            {"role": "user", "content": "And then?"},
        ]
    },
]


def jsonl(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def learned_of(tokenizer: Tokenizer, line: Line) -> list[tuple[int, bool]]:
    """Return the oracle: tokens of each part on its own, and whether they are learned.
    The parts are spelled out here.
    """
    if "prompt" in line:
        parts = [(line["prompt"], False), (line["completion"] + END, True)]
    else:
        parts = []
        for message in line["messages"]:
            by_assistant = message["role"] == "assistant"
            parts += [(f"<|{message['role']}|>", False), (f"{message['content']}{END}", by_assistant)]
    return [(each, learned) for text, learned in parts for each in tokenizer.hf(text).input_ids]


def kept(path: Path, tokenizer: Tokenizer, cache: Path) -> list[list[tuple[int, bool]]]:
    """Return the examples of a file as they were tokenized."""
    examples = examples_of(str(path), tokenizer, cache)
    starts = examples.ends - examples.lengths()
    result = [examples.tokens[start:end].tolist() for start, end in zip(starts, examples.ends, strict=True)]
    return [[(token, True) if token >= 0 else (~token, False) for token in each] for each in result]


def test_only_what_the_model_says_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Token by token, prompts, chats, several turns, characters of several tokens."""
    lines = [*PROMPTS, *CHATS]
    assert kept(jsonl(tmp_path / "a.jsonl", lines), tokenizer, tmp_path) == [
        learned_of(tokenizer, each) for each in lines
    ]


def test_a_template_may_mark_what_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With `{% generation %}`; here it leaves the end of a turn out. transformers itself says which those are."""
    hf = load_tokenizer(tokenizer.name).hf
    hf.chat_template = CHAT_TEMPLATE.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    hf.save_pretrained(tmp_path / "marked")
    marked = load_tokenizer(str(tmp_path / "marked"))
    result = kept(jsonl(tmp_path / "a.jsonl", CHATS), marked, tmp_path)
    for line, example in zip(CHATS, result, strict=True):
        messages = hf.apply_chat_template(line["messages"], return_assistant_tokens_mask=True, return_dict=True)
        assert example == list(zip(messages["input_ids"], map(bool, messages["assistant_masks"]), strict=True))
        text = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        assert hf.decode([token for token, learned in example if learned]) == "".join(text)


@pytest.mark.parametrize("trim", [False, True])
def test_no_token_reaches_from_the_prompt_into_its_completion(trim: bool, tmp_path: Path, folder: Path) -> None:
    """Wherever a text is cut: the prompt's tokens are those that it has when the model is asked.

    Also by a tokenizer that tells of a token where its text begins without the blank before it, as Llama 3's does.
    """
    from tokenizers.processors import ByteLevel

    tokenizer = load_tokenizer(str(folder))
    tokenizer.hf.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    text = 'Once upon a time,  "Meow!"  said\n\n the  naïve 🦆 bird .\n'
    lines: list[Line] = [{"prompt": text[:cut], "completion": text[cut:]} for cut in range(len(text) + 1)]
    file = jsonl(tmp_path / "a.jsonl", lines)
    for line, result in zip(lines, kept(file, tokenizer, tmp_path), strict=True):
        assert result == learned_of(tokenizer, line), line
        if line["completion"].strip():
            whole = tokenizer.hf(text + END).input_ids
            assert len(result) - len(whole) <= 4  # and apart from there, the text is tokenized as it always is


def test_a_tokenizer_that_puts_a_blank_before_each_text(tmp_path: Path) -> None:
    """As Llama 2's: tokenized on its own, a completion would begin with a blank that it has not; a BOS comes first."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rust = Rust(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    rust.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    rust.train_from_iterator(stories(), trainer)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    hf.save_pretrained(tmp_path / "llama2")
    tokenizer = load_tokenizer(str(tmp_path / "llama2"))
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": 'The bird "', "completion": 'sang" a song.'}])
    (result,) = kept(file, tokenizer, tmp_path)
    assert [token for token, _ in result] == [*hf('The bird "sang" a song.').input_ids, 2]
    assert hf.convert_ids_to_tokens([token for token, learned in result if learned])[0][0] != "▁"
    assert "".join(hf.convert_ids_to_tokens([token for token, learned in result if learned])) == 'sang"▁a▁song.</s>'


def sft(path: Path, tokenizer: Tokenizer, *, packed: bool, length: int = 48, num_samples: int = 40) -> Sft:
    examples = examples_of(str(path), tokenizer, path.parent)
    which = slice(0, len(examples.ends))
    return Sft([(examples, which)], seq_length=length, packed=packed, padding=0, seed=(1,), num_samples=num_samples)


def unpacked(sample: Mapping[str, Tensor]) -> list[list[tuple[int, bool]]]:
    """Return the examples in a sample, as `learned_of` writes them, but that the first token is learned by nobody."""
    segments = sample["segment_ids"].tolist() if "segment_ids" in sample else None
    tokens, labels, mask, positions = (
        sample[name].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")
    )
    result: list[list[tuple[int, bool]]] = []
    end = len(tokens)
    if segments is None:
        while mask[end - 1] == 0 and (tokens[end - 1], labels[end - 1]) == (0, 0):
            end -= 1
        segments = [1] * end + [0] * (len(tokens) - end)
    for number in range(1, max(segments) + 1):
        here = [at for at, segment in enumerate(segments) if segment == number]
        assert here == list(range(here[0], here[-1] + 1))
        assert [positions[at] for at in here] == list(range(len(here)))
        assert [labels[at] for at in here[:-1]] == [tokens[at] for at in here[1:]]
        result.append([(tokens[here[0]], False), *((labels[at], bool(mask[at])) for at in here)])
    rest = [at for at, segment in enumerate(segments) if segment == 0]
    assert all((tokens[at], mask[at]) == (0, 0.0) for at in rest)
    return result


@pytest.mark.parametrize("packed", [True, False])
def test_each_epoch_has_each_example_once(packed: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Whole, in another order each time, and the same whatever has been read before."""
    file = jsonl(tmp_path / "a.jsonl", PROMPTS)
    expected = [
        [(token, learned and number > 0) for number, (token, learned) in enumerate(learned_of(tokenizer, line))]
        for line in PROMPTS
    ]
    data = sft(file, tokenizer, packed=packed)
    samples = [data[number] for number in range(40)]
    assert all(sample["tokens"].shape == (48,) for sample in samples)
    examples = [example for sample in samples for example in unpacked(sample)]
    epochs = [examples[at : at + 11] for at in range(0, len(examples) - 10, 11)]
    assert len(epochs) >= 3
    for epoch in epochs:
        assert sorted(epoch) == sorted(expected)
    assert epochs[0] != epochs[1] != epochs[2]
    assert max(len(unpacked(sample)) for sample in samples) == (2 if packed else 1)
    again = pickle.loads(pickle.dumps(sft(file, tokenizer, packed=packed, num_samples=9)))
    for number in (33, 2, 17, 39):
        assert equal(samples[number], again[number])


def test_packs_are_as_full_as_their_order_allows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """No example would have fitted into the sample before its own."""
    data = sft(jsonl(tmp_path / "a.jsonl", PROMPTS), tokenizer, packed=True)
    for before, after in zip(range(3), range(1, 4), strict=True):
        used = int((data[before]["segment_ids"] > 0).sum())
        assert used + int((data[after]["segment_ids"] == 1).sum()) > 48


def test_what_is_cut_and_left_out_is_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [*PROMPTS[:4], {"prompt": "Long", "completion": " so" * 99}, {"prompt": "why " * 99, "completion": "!"}]
    lines += [{"messages": [{"role": "user", "content": "Nobody answers"}]}] * 2
    file = jsonl(tmp_path / "a.jsonl", lines)
    config = config_of(tmp_path, {"kind": "sft", "paths": [str(file)], "split": "1"}, seq_length=48)
    for packed in (True, False):
        data = provided(config.with_values(data={"packed": packed}), tokenizer, (30, 0, 0))
        assert data.train is not None
        result = {tuple(example) for number in range(30) for example in unpacked(data.train[number])}
        assert len(result) == 5
        assert max(map(len, result)) == 49
        assert data.notes == (
            f"`{file}`: 2 of 8 examples have nothing to learn and are left out",
            "2 examples to train with are longer than `training.seq_length` = 48 and cut, 1 of them left out: "
            "nothing to learn is left",
        )
    with pytest.raises(DataError, match=r"no example to train with has anything to learn within .* = 2 tokens"):
        provided(config.with_values(training={"seq_length": 2}), tokenizer, (8, 0, 0))


def test_examples_are_split_and_blended(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one, two = jsonl(tmp_path / "1.jsonl", PROMPTS[:10]), jsonl(tmp_path / "2.jsonl", CHATS * 5)
    both = {"kind": "sft", "paths": [str(one), str(two)], "split": "80,20,0", "packed": False}
    long = {"seq_length": 64}

    def texts(data: Samples | None, count: int) -> list[str]:
        assert data is not None
        return [tokenizer.hf.decode(data[number]["tokens"][:12]) for number in range(count)]

    data = provided(config_of(tmp_path, both, **long), tokenizer, (16, 4, 0))
    train, valid = texts(data.train, 16), texts(data.valid, 4)
    assert sum(text.startswith("Question") for text in train) == 8
    assert {text.split(":")[0] for text in valid if text.startswith("Question")} == {"Question 8", "Question 9"}
    weighted = provided(config_of(tmp_path, {**both, "weights": [3, 1]}, **long), tokenizer, (16, 0, 0))
    assert sum(text.startswith("Question") for text in texts(weighted.train, 16)) == 12


def test_tokens_are_kept_until_something_changes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = jsonl(tmp_path / "a.jsonl", PROMPTS)
    first = kept(file, tokenizer, tmp_path / "cache")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert {path.suffix for path in files} == {".tokens", ".ends", ".json"}
    assert kept(file, tokenizer, tmp_path / "cache") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == files
    jsonl(file, PROMPTS[1:])
    assert kept(file, tokenizer, tmp_path / "cache") == first[1:]
    jsonl(file, CHATS)
    template = load_tokenizer(tokenizer.name)
    assert kept(file, template, tmp_path / "cache") == [learned_of(tokenizer, line) for line in CHATS]
    template.hf.chat_template = CHAT_TEMPLATE.replace("message.content", "message.content | upper")
    assert kept(file, template, tmp_path / "cache") != [learned_of(tokenizer, line) for line in CHATS]


UNSTABLE = (  # it drops what the assistant has thought in other turns than the last
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last and message.role == 'assistant' %}thinking{% endif %}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


BAD: dict[str, tuple[str, Line]] = {
    "neither `messages` nor `prompt` and `completion` among its keys (text)": (CHAT_TEMPLATE, {"text": "a"}),
    "`completion` is a NoneType, not text": (CHAT_TEMPLATE, {"prompt": "a", "completion": None}),
    "`messages` is no list of messages": (CHAT_TEMPLATE, {"messages": []}),
    "message 1 has no `role`": (CHAT_TEMPLATE, {"messages": ["hi"]}),
    "message 1 has the role `bot`": (CHAT_TEMPLATE, {"messages": [{"role": "bot", "content": "a"}]}),
    "message 1 has no `content`": (CHAT_TEMPLATE, {"messages": [{"role": "user"}]}),
    "the assistant has the first word": (CHAT_TEMPLATE, {"messages": [{"role": "assistant", "content": "a"}]}),
    "has no chat template": ("", CHATS[0]),
    "the chat template refuses it: no system": ("{{ raise_exception('no system') }}", CHATS[0]),
    "the chat template writes the beginning up to message 3 otherwise": (UNSTABLE, CHATS[1]),
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_examples_are_named(problem: str, tmp_path: Path, folder: Path) -> None:
    template, line = BAD[problem]
    tokenizer = load_tokenizer(str(folder))
    tokenizer.hf.chat_template = template
    file = jsonl(tmp_path / "a.jsonl", [PROMPTS[0], line, PROMPTS[1]])
    with pytest.raises(DataError) as refused:
        examples_of(str(file), tokenizer, tmp_path / "cache")
    (item,) = refused.value.items
    assert item.startswith(f"{file}:2: ")
    assert problem in item
    assert not list((tmp_path / "cache").iterdir())


def test_fine_tuning_needs_a_tokenizer_and_examples(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "Hello?"}]}])
    config = config_of(tmp_path, {"kind": "sft", "paths": [str(file)]})
    with pytest.raises(DataError, match=r"`data\.kind` = `sft` needs a tokenizer"):
        provided(config, None, (8, 0, 0))
    with pytest.raises(DataError, match="has no example with anything to learn"):
        provided(config, tokenizer, (8, 0, 0))
