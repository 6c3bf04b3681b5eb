"""Downloads, against a server on this machine that lies, stalls, drips, truncates and redirects."""

from __future__ import annotations

import hashlib
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxgpt.config import UserError
from jaxgpt.data import download
from jaxgpt.data.download import fetch

CONTENT = b"To be, or not to be" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = len(CONTENT) // 2


class Server(BaseHTTPRequestHandler):
    """A server whose path says how it behaves."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012 - of all requests, as the handler has no owner

    def do_GET(self) -> None:
        Server.asked.append((self.path, self.headers.get("Range", "")))
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        rest = CONTENT[start:]
        match self.path:
            case "/good" | "/ranges":
                if self.path == "/ranges" and start:
                    self.answer(206, rest, {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"})
                else:
                    self.answer(200, CONTENT)
            case "/wrong-range":
                self.answer(206, rest, {"Content-Range": f"bytes {start + 1}-{len(CONTENT) - 1}/{len(CONTENT)}"})
            case "/no-range-said":
                self.answer(206, rest)
            case "/no-such-rest":
                self.answer(416 if start else 200, b"" if start else CONTENT)
            case "/lies":
                self.answer(200, CONTENT[:-1] + b"!")
            case "/truncates":
                self.answer(200, CONTENT[:1000], {"Content-Length": str(len(CONTENT))})
            case "/promises-less":
                self.answer(200, CONTENT, {"Content-Length": "1000"})
            case "/promises-more":
                self.answer(200, CONTENT[:1000], {"Content-Length": str(10**15)})
            case "/endless":
                self.answer(200, CONTENT * 100, {"Content-Length": "x"})
            case "/stalls":
                self.answer(200, CONTENT[:10], {"Content-Length": str(len(CONTENT))})
                time.sleep(0.7)
            case "/says-nothing":
                time.sleep(0.7)
            case "/drips":
                self.answer(200, b"", {"Content-Length": str(len(CONTENT))})
                for byte in CONTENT[:30]:
                    self.put(bytes([byte]))
                    time.sleep(0.03)
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
        self.put(body)

    def put(self, body: bytes) -> None:
        try:
            self.wfile.write(body)
            self.wfile.flush()
        except OSError:
            pass  # who asked has heard enough

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
    return fetch(url, SHA256, len(CONTENT), path, "--data.path FILE", timeout=timeout, schemes=("https", "http"))


def test_once_and_from_then_on_from_the_cache(url: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "text.txt"
    for _ in range(2):
        assert get(f"{url}/good", path).read_bytes() == CONTENT
    assert Server.asked == [("/good", "")]
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_copy_is_fetched_anew(url: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT[:50])
    assert get(f"{url}/chain", path).read_bytes() == CONTENT


BEGINNINGS = {
    "so far": CONTENT[:HALF],
    "of another file": b"?" * HALF,
    "all of it": CONTENT,
    "too long": CONTENT + b"?",
}


@pytest.mark.parametrize("server", ["good", "ranges", "wrong-range", "no-range-said", "no-such-rest"])
@pytest.mark.parametrize("there", BEGINNINGS)
def test_what_was_cut_off_goes_on(there: str, server: str, url: str, tmp_path: Path) -> None:
    """Whatever lies there and whatever the server makes of ranges, the file is whole, and only what is missing is asked for."""
    (tmp_path / "text.txt.part").write_bytes(BEGINNINGS[there])
    assert get(f"{url}/{server}", tmp_path / "text.txt").read_bytes() == CONTENT
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["text.txt"]
    wanted = [wanted for _, wanted in Server.asked]
    assert wanted[:1] == {"all of it": [], "too long": [""]}.get(there, [f"bytes={HALF}-"])
    if (there, server) == ("so far", "ranges"):
        assert len(wanted) == 1, "the first half was not asked for again"


def test_two_tries_make_one_file(url: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(UserError, match=r"1,000 of 19,000 bytes arrived|more expected"):
        get(f"{url}/truncates", path)
    assert not path.exists()
    assert get(f"{url}/ranges", path).read_bytes() == CONTENT
    assert [wanted for _, wanted in Server.asked] == ["", "bytes=1000-"]


@pytest.mark.parametrize(
    ("what", "message", "kept"),
    [
        ("lies", "checksum", 0),
        ("truncates", "bytes arrived|more expected", 1000),
        ("promises-less", "1,000 of 19,000 bytes arrived", 1000),
        ("promises-more", "bytes arrived|more expected", 1000),
        ("endless", "longer than the expected", 0),
        ("stalls", "timed out", 10),
        ("says-nothing", "timed out", 0),
        ("ftp", "refused ftp://|not allowed", 0),
        ("file", "refused file://|not allowed", 0),
        ("loop", "infinite loop", 0),
        ("missing", "404|Not Found", 0),
        ("no-http", "SSH-2.0", 0),
    ],
)
def test_what_is_not_the_file_is_never_in_its_place(
    what: str, message: str, kept: int, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(UserError, match=message) as error:
        get(f"{url}/{what}", folder / "text.txt")
    assert {p.name: p.stat().st_size for p in folder.iterdir()} == ({"text.txt.part": kept} if kept else {})
    assert "\n" not in str(error.value)
    assert "--data.path FILE" in str(error.value)


def test_a_server_that_drips_is_given_up(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SLOWEST", 1 << 20)
    with pytest.raises(UserError, match="too slowly"):
        get(f"{url}/drips", tmp_path / "text.txt")


def test_only_https(url: str, tmp_path: Path) -> None:
    for address in (f"{url}/good", "file:///etc/passwd", "HTTP://127.0.0.1/"):
        with pytest.raises(UserError, match="only https is followed"):
            fetch(address, SHA256, len(CONTENT), tmp_path / "x", "--data.path FILE")


def test_a_cache_that_cannot_be_written(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    for path in (tmp_path / "file" / "text.txt", tmp_path / "taken"):
        with pytest.raises(UserError, match=f"cannot download .* to {path}"):
            get(f"{url}/good", path)


def test_a_full_disk(url: str, tmp_path: Path) -> None:
    """The system's limit on a file's size stands for a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match="File too large"):
            get(f"{url}/good", tmp_path / "text.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert get(f"{url}/good", tmp_path / "text.txt").read_bytes() == CONTENT


def test_many_at_once_download_once(url: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: get(f"{url}/good", tmp_path / "text.txt", 5).read_bytes(), range(4)))
    assert got == [CONTENT] * 4
    assert Server.asked == [("/good", "")]
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["text.txt"]
