"""Files: atomic writes, locks, UTF-8, and downloads from a server that sends wrong data, stalls, truncates and redirects."""

from __future__ import annotations

import ast
import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import largest_file, repository

from jaxgpt.atomic import check_renames, write_atomically
from jaxgpt.downloads import fetch
from jaxgpt.errors import UserError
from jaxgpt.locks import LOCK, sole_writer

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
            case "/stalls":
                self.answer(200, CONTENT[:10], {"Content-Length": str(len(CONTENT))})
                time.sleep(0.7)
            case "/no-http":
                self.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            case "/file":
                self.answer(302, b"", {"Location": "file:///etc/passwd"})
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


def names_in(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.suffix != ".lock"]


def test_downloads_once_then_uses_the_cache(url: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "text.txt"
    for _ in range(2):
        assert get(f"{url}/good", path).read_bytes() == CONTENT
    assert Server.asked == ["/good"]
    assert names_in(path.parent) == ["text.txt"]


def test_a_damaged_copy_is_downloaded_again(url: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT[:50])
    assert get(f"{url}/chain", path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lies", "the checksum does not match"),
        ("truncates", "1000 bytes read"),
        ("stalls", "timed out"),
        ("file", "file://"),
        ("missing", "404"),
        ("no-http", "SSH-2.0"),
    ],
)
def test_a_failed_download_leaves_no_file(what: str, message: str, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(UserError, match=message) as error:
        get(f"{url}/{what}", folder / "text.txt")
    assert names_in(folder) == []
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert "--data.path FILE" in str(error.value)


def test_a_read_only_cache(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    for path in (tmp_path / "file" / "text.txt", tmp_path / "taken"):
        with pytest.raises(UserError, match=f"cannot download .* to {path}"):
            get(f"{url}/good", path)


def test_a_full_disk(url: str, tmp_path: Path) -> None:
    with largest_file(5000), pytest.raises(UserError, match="File too large"):
        get(f"{url}/good", tmp_path / "text.txt")
    assert get(f"{url}/good", tmp_path / "text.txt").read_bytes() == CONTENT


def test_concurrent_downloads_happen_once(url: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: get(f"{url}/good", tmp_path / "text.txt", 5).read_bytes(), range(4)))
    assert got == [CONTENT] * 4
    assert Server.asked == ["/good"]


def test_a_file_is_written_whole_or_not_at_all() -> None:
    Path("file").write_text("old")
    with largest_file(50), pytest.raises(OSError, match="File too large"):
        write_atomically(Path("file"), 100 * "x")
    assert {p.name: p.read_text() for p in Path().iterdir()} == {"file": "old"}


def test_a_file_keeps_its_mode_and_its_neighbors() -> None:
    Path("file").write_text("old")
    Path("file").chmod(0o600)
    Path("file.tmp").write_text("mine")
    write_atomically(Path("file"), "new")
    assert {p.name: p.read_text() for p in Path().iterdir()} == {"file": "new", "file.tmp": "mine"}
    assert Path("file").stat().st_mode & 0o777 == 0o600


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import os; from jaxgpt.atomic import *; {code}"])


def test_two_processes_can_write_one_file() -> None:
    """Every write succeeds, a reader always sees one complete content, and no temporary file remains."""
    write_atomically(Path("file"), "a" * 300_000)
    writers = [python(f"[write_atomically(Path('file'), {letter!r} * 300_000) for _ in range(50)]") for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        assert Path("file").read_text() in ("a" * 300_000, "b" * 300_000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_the_temporary_file_of_a_killed_process_is_deleted_and_that_of_a_living_one_is_kept() -> None:
    Path("file").write_text("old")
    killed = python("Path.replace = lambda *_: os._exit(9); write_atomically(Path('file'), 'new')")
    assert killed.wait() == 9
    [left] = Path().glob(".file.*.jaxgpt-tmp")
    assert Path("file").read_text() == "old"
    with left.open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        write_atomically(Path("file"), "newer")
        assert left.exists()
    write_atomically(Path("file"), "newest")
    assert {path.name: path.read_text() for path in Path().iterdir()} == {"file": "newest"}


def flat_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket mounted without --rename-dir-limit: directories with files cannot be renamed."""
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.is_dir() and any(self.iterdir()):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)


def test_a_file_system_that_cannot_rename_directories_is_an_error_with_the_mount_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_renames(Path(), Path("run"))
    flat_bucket(monkeypatch)
    with pytest.raises(
        UserError, match=r"write to run: .* \(Too many open files\); mount .* --rename-dir-limit 200000"
    ):
        check_renames(Path(), Path("run"))
    assert list(Path().iterdir()) == [], "nothing remains"


def test_a_full_disk_is_named_with_the_path_of_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush of a file raises an error without its path."""

    def fail(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left") as error:
        check_renames(Path(), Path("run"))
    assert error.value.filename == "probe.partial/part/file"


def test_the_probe_of_a_killed_process_is_deleted() -> None:
    for name in ("probe.partial", "renamed.partial"):
        Path(name, "part").mkdir(parents=True)
    check_renames(Path(), Path("run"))
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("old", ["old", None])
def test_a_link_is_followed(old: str | None) -> None:
    Path("there").mkdir()
    if old:
        Path("there/file").write_text(old)
    Path("link").symlink_to("there/file")
    Path("second").symlink_to("link")
    write_atomically(Path("second"), "new")
    assert Path("second").is_symlink()
    assert Path("link").is_symlink()
    assert [p.name for p in Path("there").iterdir()] == ["file"]
    assert Path("there/file").read_text() == "new"


def test_a_pipe_is_written_not_replaced() -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(Path("pipe"), "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert Path("pipe").is_fifo()


def test_one_writer_whose_kill_releases_the_lock() -> None:
    code = "import sys, time; from pathlib import Path; from jaxgpt.locks import sole_writer\n"
    code += "with sole_writer(Path()): print('mine', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mine\n"
    words = rf"is being written by process {holder.pid} on .* since \d{{4}}-.*: wait for it, or stop it"
    with pytest.raises(UserError, match=words), sole_writer(Path()):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert str(holder.pid) in Path(LOCK).read_text()
    with sole_writer(Path()):
        pass


def test_text_files_are_utf_8_in_every_locale() -> None:
    """Without an encoding, Python writes the bytes of the locale, and fails if the locale lacks a character."""
    root = repository()
    found = []
    for path in [*(root / "jaxgpt").rglob("*.py"), *(root / "examples").glob("*.py"), root / "train.py"]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and uses_locale(node):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found == []


def uses_locale(call: ast.Call) -> bool:
    """Return whether a call reads, writes or opens a text file without an encoding."""
    if not isinstance(call.func, ast.Attribute) or any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    match call.func.attr, call.args:
        case ("read_text", []) | ("write_text", [_]) | ("open", []):
            return True
        case "open", [mode, *_]:
            values = [node.value for node in ast.walk(mode) if isinstance(node, ast.Constant)]
            return any(value in ("r", "w", "a", "x", "r+", "w+") for value in values)
    return False
