"""`transformers serve` answers OpenAI's client from exported models, as transformers itself generates with them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mcore_convert import convert, export
from tests.conftest import HfMaker

MESSAGE: ChatCompletionUserMessageParam = {"role": "user", "content": "Tell me of a duck."}
PROMPT = "Once upon a time"
TOKENS = 6


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a server of its own, which loads a model when it is asked for."""
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    for _ in range(4):  # another process may take the port before the server has it
        port = free_port()
        server = started(port, log)
        try:
            with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as result:
                if answers(server, port):
                    yield result
                    return
        finally:
            server.terminate()
            server.wait(timeout=30)
        assert "address already in use" in log.read_text(), log.read_text()
    pytest.fail("four ports were taken")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def started(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "transformers"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen([*command, "--device", "cpu"], stdout=output, stderr=output, env=environment)


def answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether a server comes up; false where it has ended."""
    deadline = time.monotonic() + 90
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health") as answer:
            if answer.status == 200:
                return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module", params=["gpt2", "llama-gqa", "qwen3_moe"])
def model(request: pytest.FixtureRequest, hf_checkpoint: HfMaker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An export of a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("served")
    convert(hf_checkpoint(request.param, fill="normal"), folder / "megatron", tp=2)
    return str(export(folder / "megatron").path)


def generated(model: str, text: str) -> str:
    """Return what transformers generates after a text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(text, return_tensors="pt")
    ids = AutoModelForCausalLM.from_pretrained(model).generate(**tokens, max_new_tokens=TOKENS, do_sample=False)
    message: str = tokenizer.decode(ids[0, tokens.input_ids.shape[1] :], skip_special_tokens=True)
    return message


def plain(answer: str | None, model: str, tokenizer: Any) -> str:
    """Return an answer without the special tokens that the server leaves out for other models and shows for Qwen's."""
    for token in tokenizer.added_tokens_decoder.values() if is_qwen(model) else ():
        if token.special:
            answer = (answer or "").replace(str(token), "")
    return answer or ""


def is_qwen(model: str) -> bool:
    return str(AutoConfig.from_pretrained(model).model_type).startswith("qwen")


def test_a_chat_is_answered(client: OpenAI, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = generated(model, tokenizer.apply_chat_template([MESSAGE], tokenize=False, add_generation_prompt=True))
    answer = client.chat.completions.create(model=model, messages=[MESSAGE], max_tokens=TOKENS)
    assert plain(answer.choices[0].message.content, model, tokenizer) == wanted
    if is_qwen(model):
        return  # the server streams the message of the user in its place
    parts = client.chat.completions.create(model=model, messages=[MESSAGE], max_tokens=TOKENS, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted


def test_a_text_is_completed(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=TOKENS)
    assert answer.choices[0].text == generated(model, PROMPT)
