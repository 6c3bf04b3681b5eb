"""Downloads from a local server that sends wrong data, stalls, truncates and redirects."""

from __future__ import annotations

import hashlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxgpt.config import UserError
from jaxgpt.data.download import fetch

CONTENT = b"To be, or not to be" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(BaseHTTPRequestHandler):
    """A server whose paths select its behavior."""

    asked: list[str] = []  # noqa: RUF012 - of all requests, as the handler has no owner

    def do_GET(self) -> None:
        Server.asked.append(self.path)
        match self.path:
            case "/good":
                self.answer(200, CONTENT)
            case "/lies":
                self.answer(200, CONTENT[:-1] + b"!")
            case "/truncates":
                self.answer(200, CONTENT[:1000], {"Content-Length": str(len(CONTENT))})
            case "/promises-less":
                self.answer(200, CONTENT, {"Content-Length": "1000"})
            case "/stalls":
                self.answer(200, CONTENT[:10], {"Content-Length": str(len(CONTENT))})
                time.sleep(0.7)
            case "/says-nothing":
                time.sleep(0.7)
            case "/no-http":
                self.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            case "/ftp":
                self.answer(302, b"", {"Location": "ftp://127.0.0.1/x"})
            case "/file":
                self.answer(302, b"", {"Location": "file:///etc/passwd"})
            case "/loop":
                self.answer(302, b"", {"Location": "/loop"})
            case "/chain":
                self.answer(301, b"", {"Location": "/good"})
            case _:
                self.answer(404, b"")

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
            self.wfile.flush()
        except OSError:
            pass  # the client has gone

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(autouse=True)
def nothing_asked_yet() -> None:
    Server.asked.clear()


def get(url: str, path: Path, timeout: float = 0.3) -> Path:
    return fetch(url, SHA256, path, "--data.path FILE", timeout=timeout)


def left_in(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.suffix != ".lock"]


def test_downloads_once_then_uses_the_cache(url: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "text.txt"
    for _ in range(2):
        assert get(f"{url}/good", path).read_bytes() == CONTENT
    assert Server.asked == ["/good"]
    assert left_in(path.parent) == ["text.txt"]


def test_a_damaged_copy_is_downloaded_again(url: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT[:50])
    assert get(f"{url}/chain", path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lies", "the checksum does not match"),
        ("truncates", "1000 bytes read"),
        ("promises-less", "the checksum does not match"),
        ("stalls", "timed out"),
        ("says-nothing", "timed out"),
        ("ftp", "ftp://"),
        ("file", "file://"),
        ("loop", "redirects"),
        ("missing", "404"),
        ("no-http", "SSH-2.0"),
    ],
)
def test_a_failed_download_leaves_no_file(what: str, message: str, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(UserError, match=message) as error:
        get(f"{url}/{what}", folder / "text.txt")
    assert left_in(folder) == []
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert "--data.path FILE" in str(error.value)


def test_without_a_network_the_error_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but not listening
        port = nobody.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot download http://127.0.0.1:{port}/good .*no connection") as error:
            get(f"http://127.0.0.1:{port}/good", tmp_path / "text.txt")
    assert "--data.path FILE" in str(error.value)
    assert len(str(error.value)) < 500


def test_a_read_only_cache(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    for path in (tmp_path / "file" / "text.txt", tmp_path / "taken"):
        with pytest.raises(UserError, match=f"cannot download .* to {path}"):
            get(f"{url}/good", path)


def test_a_full_disk(url: str, tmp_path: Path) -> None:
    """Simulated by the limit on file size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match="File too large"):
            get(f"{url}/good", tmp_path / "text.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert get(f"{url}/good", tmp_path / "text.txt").read_bytes() == CONTENT


def test_concurrent_downloads_happen_once(url: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: get(f"{url}/good", tmp_path / "text.txt", 5).read_bytes(), range(4)))
    assert got == [CONTENT] * 4
    assert Server.asked == ["/good"]
