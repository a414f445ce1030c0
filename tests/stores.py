"""Remote stores for tests: fsspec's memory, and an S3 server on loopback whose requests are counted and may fail."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import fsspec.config
import pytest

CREDENTIALS = {"key": "test", "secret": "test"}


class Asked(NamedTuple):
    """A request to the server."""

    method: str
    path: str
    range: str
    nbytes: int

    @property
    def wanted(self) -> int:
        """The bytes that it asks for by range."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.range)
        return 0 if match is None else int(match[2]) - int(match[1]) + 1


@dataclass
class Server:
    """What an S3 server was asked, and how it answers: `dropped` cuts a connection, `refusal` is the body of a 403."""

    url: str
    requests: list[Asked] = field(default_factory=list)
    dropped: Callable[[int], bool] = lambda number: False
    refusal: Callable[[Asked], str | None] = lambda asked: None


ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


def answering(server: Server, app: Any) -> Any:
    """Return the server's application with faults before it."""

    def answer(environ: dict[str, Any], start: Any) -> Any:
        asked = Asked(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"],
            environ.get("HTTP_RANGE", ""),
            int(environ.get("CONTENT_LENGTH") or 0),
        )
        server.requests.append(asked)
        if server.dropped(len(server.requests)):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("cut by the test")
        code = server.refusal(asked)
        if code is not None:
            environ["wsgi.input"].read(asked.nbytes)
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [ERROR.format(code=code, message=f"refused: {code}").encode()]
        return app(environ, start)

    return answer


@contextlib.contextmanager
def running_s3() -> Iterator[Server]:
    """An S3 server with a bucket `models`, which fsspec knows by its configuration."""
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("werkzeug"), "disabled", True)
        host, port = moto.get_host_and_port()
        server = Server(f"http://{host}:{port}")
        inner: Any = moto._server
        patch.setattr(inner, "app", answering(server, inner.app))
        names = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=server.url, **names)
        client.create_bucket(Bucket="models")
        client.close()
        patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": server.url, **CREDENTIALS})
        try:
            yield server
        finally:
            moto.stop()


def tree_of(url: str) -> dict[str, bytes]:
    """Return the content of every file below a URL."""
    fs, key = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    root = fs._strip_protocol(url).strip("/")
    return {name.strip("/").removeprefix(f"{root}/"): fs.cat_file(name) for name in sorted(fs.find(key))}


def put(folder: Path, url: str) -> None:
    """Copy a directory to a store."""
    fs, key = fsspec.url_to_fs(url)
    for file in folder.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{key}/{file.relative_to(folder)}", file.read_bytes())
