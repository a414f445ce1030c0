"""Examples for fine-tuning as text: a prompt and its completion, or a chat, and the parts that a model is to learn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train_entry.data.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the mark by which a template itself delimits the assistant's text


@dataclass(frozen=True)
class Example:
    """Text in parts, each with whether it is to be learned. `closed`: tokens for begin and end of text go around it."""

    parts: tuple[tuple[str, bool], ...]
    closed: bool


@dataclass(frozen=True)
class Marked:
    """Chat whose template itself marks the text to learn: tokens, and whether each is to be learned."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


def example_of(record: Any, tokenizer: Tokenizer) -> Example | Marked:
    """Return a record as text: `prompt` and `completion`, or `messages` (and `tools`) by the tokenizer's chat template.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    if "messages" in record:
        return _chat(record, tokenizer)
    if "prompt" not in record or "completion" not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise ValueError(f"neither `messages` nor `prompt` and `completion` among its keys ({keys})")
    for key in ("prompt", "completion"):
        if not isinstance(record[key], str):
            raise ValueError(f"`{key}` is a {type(record[key]).__name__}, not text")
        record[key].encode()  # half of a surrogate pair is not text
    return Example(((record["prompt"], False), (record["completion"], True)), closed=True)


def _chat(record: Mapping[str, Any], tokenizer: Tokenizer) -> Example | Marked:
    _check(record["messages"])
    template = tokenizer.hf.chat_template
    if not template:
        raise ValueError(f"the tokenizer `{tokenizer.name}` has no chat template for `messages`")
    if MARKED.search(
        template if isinstance(template, str) else tokenizer.hf.get_chat_template(None, record.get("tools"))
    ):
        encoded = _written(record["messages"], record, tokenizer, tokenize=True, return_assistant_tokens_mask=True)
        return Marked(tuple(encoded["input_ids"]), tuple(map(bool, encoded["assistant_masks"])))
    return Example(tuple(_parts(record, tokenizer)), closed=False)  # a template adds begin and end itself


def _parts(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the chat as rendered by the template, cut where the assistant's text begins and ends.

    The assistant's text begins after the template's prompt for it (`add_generation_prompt`) and ends, including
    the end of its turn, where the next message begins.
    """
    messages = record["messages"]
    whole: str = _written(messages, record, tokenizer)
    done = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("the assistant has the first word")
        before: str = _written(messages[:number], record, tokenizer, add_generation_prompt=True)
        through: str = _written(messages[: number + 1], record, tokenizer)
        if not (len(before) >= done and through.startswith(before) and whole.startswith(through)):
            raise ValueError(
                f"the chat template writes the beginning up to message {number + 1} otherwise when more follows; give "
                "each turn as a chat of its own, or a template that marks the assistant's with {% generation %}"
            )
        yield whole[done : len(before)], False
        yield whole[len(before) : len(through)], True
        done = len(through)
    yield whole[done:], False


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` is no list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no `role`")
        if message["role"] not in ROLES:
            raise ValueError(f"message {number} has the role `{message['role']}`, not one of {', '.join(ROLES)}")
        if message.get("content") is None and message["role"] != "assistant":
            raise ValueError(f"message {number} has no `content`")


def _written(
    messages: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    tokenize: bool = False,
    **options: Any,
) -> Any:
    """Return messages as rendered by the template: text, or tokens."""
    from jinja2 import TemplateError

    try:
        written = tokenizer.hf.apply_chat_template(
            messages, tools=record.get("tools"), tokenize=tokenize, return_dict=tokenize, **options
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
    if not tokenize:
        written.encode()  # half of a surrogate pair is not text
    return written
