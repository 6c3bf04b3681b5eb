"""Downloads, against a server on this machine that lies, stalls, truncates and redirects."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxgpt.config import UserError
from jaxgpt.data.download import fetch

CONTENT = b"To be, or not to be" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(BaseHTTPRequestHandler):
    served = 0

    def do_GET(self) -> None:
        Server.served += 1
        match self.path:
            case "/redirect":
                self.send_response(302)
                self.send_header("Location", "ftp://127.0.0.1/x")
                self.end_headers()
                return
            case "/missing":
                self.send_error(404)
                return
        self.send_response(200)
        if self.path != "/endless":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        match self.path:
            case "/good":
                self.wfile.write(CONTENT)
            case "/lies":
                self.wfile.write(CONTENT[:-1] + b"!")
            case "/truncates":
                self.wfile.write(CONTENT[:1000])
            case "/endless":
                try:
                    for _ in range(1000):
                        self.wfile.write(CONTENT)
                except OSError:
                    pass
            case "/stalls":
                self.wfile.write(CONTENT[:10])
                self.wfile.flush()
                time.sleep(1.5)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def get(url: str, path: Path, timeout: float = 0.5) -> Path:
    return fetch(url, SHA256, len(CONTENT), path, "--data.path FILE", timeout=timeout, schemes=("https", "http"))


def test_once_and_from_then_on_from_the_cache(url: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "text.txt"
    before = Server.served
    for _ in range(2):
        assert get(f"{url}/good", path).read_bytes() == CONTENT
    assert Server.served == before + 1


def test_a_damaged_copy_is_fetched_anew(url: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT[:50])
    assert get(f"{url}/good", path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lies", "checksum"),
        ("truncates", "arrived|IncompleteRead|retrieval incomplete"),
        ("endless", "longer than the expected"),
        ("stalls", "timed out"),
        ("redirect", "refused ftp://|not allowed"),
        ("missing", "404|Not Found"),
    ],
)
def test_what_is_not_the_file_leaves_nothing(what: str, message: str, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(UserError, match=message) as error:
        get(f"{url}/{what}", folder / "text.txt")
    assert list(folder.iterdir()) == []
    assert "\n" not in str(error.value)
    assert "--data.path FILE" in str(error.value)


def test_only_https(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only https is followed"):
        fetch(f"{url}/good", SHA256, len(CONTENT), tmp_path / "x", "--data.path FILE")
