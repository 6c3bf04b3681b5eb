"""Imports from the hub, without network: the cache, the pinned commit, one-line errors."""

import http.server
import os
import shutil
import subprocess
import sys
import threading
import time

import huggingface_hub
import pytest
from folders import hf_folder
from huggingface_hub import constants, errors

from jaxgpt import hub
from jaxgpt.convert.hub_models import PATTERNS, fetch_model
from jaxgpt.convert.import_model import import_model
from jaxgpt.data.tokenizers.new import GPT2_REVISION
from jaxgpt.errors import UserError
from jaxgpt.hub import reachable

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache in the layout of the hub's client: blobs, and a snapshot of links."""
    root = tmp_path / "cache"
    snapshot = root / "models--someone--tiny" / "snapshots" / COMMIT
    blobs = root / "models--someone--tiny" / "blobs"
    folder = hf_folder(tmp_path / "made")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        shutil.move(file, blobs / file.name)
        (snapshot / file.name).symlink_to(blobs / file.name)
    refs = root / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: real(*a, cache_dir=root, **k))


@pytest.mark.parametrize("revision", ["", COMMIT])
def test_offline_from_the_cache(cache, tmp_path, revision):
    folder, commit = fetch_model("someone/tiny", revision)
    assert commit == COMMIT
    assert import_model(folder, tmp_path / "run").family == "gpt2"


@pytest.mark.parametrize(("name", "revision"), [("someone/tiny", "f" * 40), ("someone/else", "")])
def test_offline_and_not_in_the_cache(cache, name, revision):
    with pytest.raises(UserError, match="not in the hub's cache") as e:
        fetch_model(name, revision)
    assert "\n" not in str(e.value)


def test_requested_files(monkeypatch):
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return f"/nowhere/{COMMIT}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    fetch_model("gpt2")
    assert asked == {
        "repo": "openai-community/gpt2",
        "repo_type": "model",
        "revision": GPT2_REVISION,
        "allow_patterns": list(PATTERNS),
        "ignore_patterns": ["consolidated*"],
        "local_files_only": False,
    }
    assert not [p for p in PATTERNS if p.endswith((".bin", ".pt", ".py", "*"))]
    fetch_model("someone/tiny", "v1")
    assert asked["revision"] == "v1"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "requires consent"),
        (errors.RepositoryNotFoundError, "the repository does not exist"),
        (errors.RevisionNotFoundError, "the revision does not exist"),
        (errors.LocalEntryNotFoundError, "not in the hub's cache"),
        (errors.OfflineModeIsEnabled, "offline mode"),
        (OSError, "OSError: disk full"),
    ],
)
def test_errors_are_one_line(monkeypatch, error, message):
    def fail(*_, **__):
        # Created without the HTTP response that its initializer needs.
        made = error.__new__(error)
        made.args = ("disk\nfull",)
        raise made

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    with pytest.raises(UserError, match=message) as e:
        fetch_model("someone/tiny")
    assert "\n" not in str(e.value)


OFFLINE = """
import sys, time
from jaxgpt.convert.hub_models import fetch_model
from jaxgpt.data.tokenizers.new import make_tokenizer
began = time.perf_counter()
for ask in (lambda: fetch_model("someone/tiny"), lambda: make_tokenizer("gpt2", "", 0, 0)):
    try:
        ask()
    except ValueError as e:
        print(e)
print(time.perf_counter() - began < 10)
"""


def test_no_network_is_one_line_within_five_seconds(tmp_path):
    """By default, the hub's client retries for half a minute and prints a line per attempt."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, env=environment, check=True)
    model, tokenizer, soon = done.stdout.splitlines()
    assert "someone/tiny at main: not in the hub's cache, and the hub cannot be reached" in model
    assert "the tokenizer gpt2: openai-community/gpt2 at" in tokenizer
    assert "not in the hub's cache, and the hub cannot be reached" in tokenizer
    assert (soon, done.stderr) == ("True", "")


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    class Silent:
        def head(self, *_, **__):
            time.sleep(60)

    monkeypatch.setattr(huggingface_hub, "get_session", Silent)
    began = time.perf_counter()
    assert not reachable(0.1)
    assert time.perf_counter() - began < 5


class SlowHub(http.server.BaseHTTPRequestHandler):
    """A hub that answers the first request late, and knows no repository."""

    def do_HEAD(self):
        time.sleep(4)
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_hub_may_answer_later_than_it_accepts_a_connection(monkeypatch):
    """The limit of a connection is shorter than the time to answer, which the client's own settings limit."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        assert reachable(2.0)
        with pytest.raises(UserError, match=r"not in the hub's cache, and http.* answers with HTTP status 404"):
            fetch_model("someone/else")
    finally:
        server.shutdown()


class PersistentHub(http.server.BaseHTTPRequestHandler):
    """A hub that keeps connections open, and answers the second request of a connection late."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_HEAD(self):
        self.requests += 1
        if self.requests > 1:
            time.sleep(2)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_hub_with_an_open_connection_may_answer_late(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), PersistentHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT)
        assert reachable(1.0)
    finally:
        server.shutdown()


def test_a_refused_connection_is_known_before_the_limit(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    began = time.perf_counter()
    assert not reachable(60)
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x", "a b/c"])
def test_invalid_names(name):
    with pytest.raises(UserError, match="is not a file, a directory or a hub repository"):
        fetch_model(name)
