"""Export to the hub: a local server receives the files; each failure is one line and deletes no file."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from folders import LLAMA, SMALL, run_folder
from helpers import Result, jaxgpt
from huggingface_hub import constants

from jaxgpt.cli.export import parse_size
from jaxgpt.convert.import_model import import_model
from jaxgpt.errors import UserError

TOKENS = {"hf_owner": 200, "hf_reader": 403}  # the status of a write with each token; others: 401


class Hub(BaseHTTPRequestHandler):
    """The requests of an upload, in one commit."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]

    def reply(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while True:
            size = int(self.rfile.readline(), 16)
            data += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                return data

    def do_HEAD(self) -> None:
        self.reply(200, {})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            found = [{"type": "file", "path": path, "oid": "0" * 40, "size": 1} for path in self.files]
            self.reply(200, found)
            return
        self.reply(200, {"sha": "0" * 40, "siblings": [], "id": "me/tiny"})

    def do_POST(self) -> None:
        body = self.body()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        status = TOKENS.get(token, 401)
        host = f"http://{self.headers['Host']}"
        if status != 200:
            self.reply(status, {"error": "rejected"})
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.reply(200, {"url": f"{host}/me/tiny", "name": "me/tiny", "id": "1"})
        elif self.path == "/api/validate-yaml":
            self.reply(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self.reply(200, {"files": files})
        else:
            assert "/commit/" in self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                if line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            commit = "1" * 40
            self.reply(200, {"commitUrl": f"{host}/me/tiny/commit/{commit}", "commitOid": commit, "hookOutput": ""})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """Serve a hub on this machine, with a valid token in the environment."""
    kind = type("OneHub", (Hub,), {"files": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    yield kind
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return run_folder(tmp_path / "run", LLAMA)


def error(result: Result) -> str:
    assert result.code == 2, result.err
    return [line for line in result.err.splitlines() if line.startswith("jaxgpt: ")][-1]


def test_every_file_arrives_in_a_private_repository(hub: type[Hub], run: Path) -> None:
    result = jaxgpt("export", "run", "out", "--push", "me/tiny", "--license", "mit", "--json")
    assert result.code == 0, result.err
    assert result.json["address"].endswith("/me/tiny")
    assert hub.files == {path.name: path.read_bytes() for path in Path("out").iterdir()}
    [created] = hub.created
    assert created.get("private") or created.get("visibility") == "private"
    card = hub.files["README.md"].decode()
    assert 'from_pretrained("me/tiny")' in card
    assert "jaxgpt import me/tiny runs/tiny" in card
    assert "\nlicense: mit\n" in card
    assert "mit, as chosen for this export" in card


def test_a_pushed_model_replaces_the_files_of_an_earlier_one(hub: type[Hub], run: Path) -> None:
    """transformers prefers a single file of weights to shards, an adapter to a model, and a separate file of the template."""
    earlier = ("model.safetensors", "adapter_config.json", "chat_template.jinja", "added_tokens.json")
    others = ("notes.md", "data/model.txt", ".gitattributes")
    for name in (*earlier, *others):
        hub.files[name] = b"old"
    result = jaxgpt("export", "run", "out", "--push", "me/tiny", "--shard-size", "4KB")
    assert result.code == 0, result.err
    written = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert "model.safetensors" not in written
    assert hub.files == written | dict.fromkeys(others, b"old")

    assert jaxgpt("export", "run", "again", "--push", "me/tiny").code == 0
    assert {name for name in hub.files if name.endswith((".safetensors", ".index.json"))} == {"model.safetensors"}


def test_a_public_repository_is_asked_for(hub: type[Hub], run: Path) -> None:
    assert jaxgpt("export", "run", "out", "--push", "me/tiny", "--public").code == 0
    [created] = hub.created
    assert not created.get("private")
    assert created.get("visibility") != "private"


def test_without_a_login_nothing_is_written(
    hub: type[Hub], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "not logged in; run hf auth login, or set HF_TOKEN" in error(
        jaxgpt("export", "run", "out", "--push", "me/x")
    )
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("hf_wrong", "the token is not valid: run hf auth login"),
        ("hf_reader", "the token has no permission to write there"),
    ],
)
def test_a_rejected_token_keeps_the_files(
    hub: type[Hub], run: Path, monkeypatch: pytest.MonkeyPatch, token: str, reason: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    message = error(jaxgpt("export", "run", "out", "--push", "me/tiny"))
    assert reason in message
    assert message.endswith("the files are in out: run hf upload me/tiny out")
    assert Path("out/model.safetensors").is_file()
    assert not hub.files


def test_an_unreachable_hub_keeps_the_files(hub: type[Hub], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        message = error(jaxgpt("export", "run", "out", "--push", "me/tiny"))
    assert "cannot be reached; the files are in out" in message
    assert Path("out/config.json").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["out", "--push", "model"], "'model' is not a repository of the hub: use OWNER/NAME"),
        (["out", "--public"], "--public has no effect without --push"),
        (["out", "--shard-size", "0GB"], "--shard-size must be a number with KB, MB or GB, such as 5GB, not '0GB'"),
        (["out", "--shard-size", "5"], "--shard-size must be a number"),
        (["out", "--license", "My License"], "license 'My License' is not a license identifier of the hub"),
        (["out.gguf", "--push", "me/x"], "--push needs a directory"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_write_nothing(hub: type[Hub], run: Path, args: list[str], message: str) -> None:
    assert message in error(jaxgpt("export", "run", *args))
    assert not Path(args[0]).exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KB", 1500)])
def test_sizes_have_decimal_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_shards_in_bfloat16_have_the_same_bits_after_an_import(run: Path) -> None:
    args = ["--dtype", "bfloat16", "--shard-size", "1KB"]
    assert jaxgpt("export", "run", "first", *args).code == 0
    shards = sorted(Path("first").glob("model-*.safetensors"))
    assert len(shards) > 2
    import_model(Path("first"), Path("back"))
    assert jaxgpt("export", "back", "second", *args).code == 0
    for path in [*shards, Path("first/model.safetensors.index.json")]:
        assert (Path("second") / path.name).read_bytes() == path.read_bytes()


def test_the_card_names_the_programs_that_load_the_model_and_its_limits(tmp_path: Path) -> None:
    run_folder(tmp_path / "llama", LLAMA)
    run_folder(tmp_path / "gpt2", SMALL)
    assert jaxgpt("export", str(tmp_path / "llama"), str(tmp_path / "a")).code == 0
    card = (tmp_path / "a/README.md").read_text()
    assert "vllm serve a" in card
    assert "The model continues texts of up to" in card
    assert "no record of their training" in card


def test_a_license_that_is_no_name_is_rejected_in_python(run: Path) -> None:
    from jaxgpt.convert.export_model import export_model

    with pytest.raises(UserError, match="is not a license identifier of the hub"):
        export_model(run, Path("out"), license="mine\nevil: 1")
    assert not Path("out").exists()
