"""Serve local files as the Hugging Face Hub serves datasets, to run `hf:` commands without the Hub.

Usage:
    python benchmarks/hub.py write DIRECTORY
    python benchmarks/hub.py serve DIRECTORY COMMAND ...

write:  make the dataset `local/modules` in DIRECTORY: the modules of Python's standard library, one document per row, in two
        Parquet files, `data/train-00000-of-00002.parquet` and `data/train-00001-of-00002.parquet`.
serve:  run a command with HF_ENDPOINT set to a server of the datasets in DIRECTORY (DIRECTORY/OWNER/NAME/FILES), on
        127.0.0.1, and with the Hub's cache in DIRECTORY/.cache. The exit code is the command's.

    python benchmarks/hub.py write hub
    python benchmarks/hub.py serve hub jaxgpt data prepare 'hf:local/modules/data/train*' --out modules --tokenizer bpe
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

FILES = 2


class Datasets(BaseHTTPRequestHandler):
    """The requests of a download: the commit, the list of files, and each file."""

    root: Path  # directory with a dataset at OWNER/NAME
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        match path.strip("/").split("/"):
            case ["api", "datasets", owner, name, *_] if not (self.root / owner / name).is_dir():
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            case ["api", "datasets", owner, name, "revision", _]:
                names = [{"rfilename": name} for name in self.files(owner, name)]
                self.reply_json({"id": f"{owner}/{name}", "sha": self.commit(owner, name), "siblings": names})
            case ["api", "datasets", owner, name, "tree", *_]:
                found = self.files(owner, name)
                tree = [{"type": "file", "path": each, "oid": "0" * 40, "size": size} for each, size in found.items()]
                self.reply_json(tree)
            case ["datasets", owner, name, "resolve", _, *parts]:
                self.reply_file(self.root / owner / name / "/".join(parts), self.commit(owner, name))
            case _:
                self.reply(404 if path.strip("/") else 200, b"")

    def files(self, owner: str, name: str) -> dict[str, int]:
        """Return the size of each file of a dataset, in bytes."""
        directory = self.root / owner / name
        return {
            path.relative_to(directory).as_posix(): path.stat().st_size
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }

    def commit(self, owner: str, name: str) -> str:
        listing = json.dumps(self.files(owner, name))
        return hashlib.sha1(listing.encode()).hexdigest()

    def reply_json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply_file(self, path: Path, commit: str) -> None:
        if not path.is_file():
            self.reply(404, b"")
            return
        data = path.read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        self.reply(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve the datasets below a directory; yield the URL of the server."""
    handler = type("Handler", (Datasets,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def modules() -> list[dict[str, str]]:
    """Return the modules of Python's standard library as rows; those that are not UTF-8 are omitted."""
    library = Path(sysconfig.get_paths()["stdlib"])
    rows = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if name.startswith(("site-packages/", "dist-packages/")):
            continue
        try:
            rows.append({"path": name, "text": path.read_text("utf-8")})
        except UnicodeDecodeError:
            continue
    return rows


def write(root: Path) -> None:
    """Write the dataset `local/modules`, with its rows split over `FILES` Parquet files."""
    import pyarrow
    from pyarrow import parquet

    rows = modules()
    directory = root / "local" / "modules" / "data"
    directory.mkdir(parents=True)
    for number in range(FILES):
        part = rows[number * len(rows) // FILES : (number + 1) * len(rows) // FILES]
        parquet.write_table(pyarrow.Table.from_pylist(part), directory / f"train-{number:05}-of-{FILES:05}.parquet")
    size = sum(len(row["text"].encode()) for row in rows)
    print(f"{len(rows):,} documents with {size / 1e6:.1f} MB of text in {FILES} files of {directory}")


def serve(root: Path, command: list[str]) -> int:
    """Run a command whose Hub is `root`, and return its exit code."""
    with serving(root) as url:
        settings = {"HF_ENDPOINT": url, "HF_HOME": str(root.resolve() / ".cache"), "HF_HUB_OFFLINE": "0"}
        return subprocess.run(command, env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", directory]:
            write(Path(directory))
        case ["serve", directory, *command] if command:
            sys.exit(serve(Path(directory), command))
        case _:
            sys.exit(__doc__)
