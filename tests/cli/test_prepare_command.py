"""jaxgpt data prepare: the command, kills, and what it writes when something is wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import TEXT, jaxgpt

from jaxgpt.cli.data_prepare import _parse_count
from jaxgpt.data.tokenizer_files import train_bpe
from jaxgpt.errors import UserError
from jaxgpt.files import sole_writer

PREPARE = ("data", "prepare", "src", "--tokenizer", "tokenizer.json", "--workers", "1")


@pytest.fixture(autouse=True)
def sources(in_empty_folder: Path) -> None:
    Path("tokenizer.json").write_text(train_bpe([[TEXT]], 300).to_json())
    Path("src").mkdir()
    lines = [json.dumps({"text": f"{i} {TEXT[i : i + 200]}"}) for i in range(300)]
    Path("src/a.jsonl").write_text("\n".join(lines))
    Path("src/b.txt").write_text(TEXT)


def contents(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(directory).glob("[!.]*"))}


def test_prepared_data_is_described() -> None:
    result = jaxgpt(*PREPARE, "--out", "out", "--shard-tokens", "10k", "--val-fraction", "0.05")
    assert result.code == 0, result.err
    assert "documents" in result.out
    assert result.out.endswith("jaxgpt train --data.path out\n")
    again = jaxgpt(*PREPARE, "--out", "out", "--shard-tokens", "10_000", "--val-fraction=0.05", "--json")
    index = json.loads(again.out)
    assert index["splits"]["train"]["shards"][0]["tokens"] == 10_000
    report = json.loads(jaxgpt("data", "report", "out", "--json").out)
    assert report["train_tokens"] == index["splits"]["train"]["tokens"]
    assert report["validation_tokens"] == index["splits"]["val"]["tokens"]


@pytest.mark.ci
def test_prepared_data_is_trained_on() -> None:
    assert jaxgpt(*PREPARE, "--out", "out", "--val-fraction", "0.05").code == 0
    small = ("--model.n-layer=1", "--model.n-head=1", "--model.n-embd=8", "--model.block-size=16", "--train.steps=2")
    trained = jaxgpt(
        "train", "--data.path", "out", "--data.documents", "mask", *small, "--train.batch-size=2", "--out=run"
    )
    assert trained.code == 0, trained.err
    assert jaxgpt("eval", "run").code == 0


def test_counts_have_units() -> None:
    counts = {"100M": 10**8, "8.2m": 8_200_000, "1_000": 1000, "1,000": 1000, "0.1k": 100, "1e3": 1000, "2B": 2 * 10**9}
    assert {word: _parse_count("--shard-tokens", word) for word in counts} == counts
    for word in ("nan", "inf", "-inf", "1e999999999", "", "M", "1..2", "many"):
        with pytest.raises(UserError, match="--shard-tokens must be a number of tokens"):
            _parse_count("--shard-tokens", word)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data", "prepare", "src"), "--out"),
        (("data", "prepare", "--out", "out"), "the documents to tokenize"),
        (("data", "prepare", "src", "more", "--out", "out"), "no such file or directory: more"),
        ((*PREPARE, "--out", "out", "--shard-tokens", "0.4"), "--shard-tokens must be at least 1"),
        ((*PREPARE, "--out", "out", "--on-error", "ignore"), "--on-error"),
        ((*PREPARE, "--out", "out", "--overwrite"), "--overwrite"),
        ((*PREPARE, "--out", "src"), "--out src is inside the source src"),
        ((*PREPARE, "--out", "tokenizer.json"), "cannot write to tokenizer.json: File exists"),
        ((*PREPARE, "--out", "."), "is not empty and was not written by jaxgpt data prepare"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str) -> None:
    before = contents("src"), sorted(Path().iterdir())
    result = jaxgpt(*words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert (contents("src"), sorted(Path().iterdir())) == before


def test_a_second_writer_is_rejected() -> None:
    Path("out").mkdir()
    with sole_writer(Path("out")):
        result = jaxgpt(*PREPARE, "--out", "out")
        assert result.code == 2
        assert f"out is being written by process {os.getpid()}" in result.err
        assert contents("out") == {}


def test_a_full_disk_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.prepare.SAVE_EVERY", -1.0)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    assert jaxgpt(*PREPARE, "--out", "whole").code == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        result = jaxgpt(*PREPARE, "--out", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.code == 1
    assert result.err == "jaxgpt: cannot write out: File too large\n"
    assert json.loads(Path("out/index.json").read_text())["splits"]["train"]["tokens"] > 1000
    again = jaxgpt(*PREPARE, "--out", "out")
    assert "continuing out after" in again.err
    assert contents("out") == contents("whole")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = list[subprocess.Popen[bytes]]()
    yield started
    for process in started:
        process.kill()
        process.wait()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from jaxgpt.cli import main
from jaxgpt.data import documents, prepare, shards

documents.BLOCK, prepare.BATCH, prepare.SAVE_EVERY = 2000, 2000, 0.01
left = int(sys.argv[1])

def killing(operation):
    def run(*args):
        global left
        left -= 1
        if left == 0:
            workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            print(left, workers, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args)
    return run

shards.ShardWriter.write = killing(shards.ShardWriter.write)
os.fsync, os.replace = killing(os.fsync), killing(os.replace)
if __name__ == "__main__":
    code = main(sys.argv[2:])
    print(left)
    sys.exit(code)
"""


def command(out: str, kill_at: int, workers: int) -> list[str]:
    Path("prepare.py").write_text(SCRIPT)
    options = ("--out", out, "--shard-tokens", "3000", "--workers", str(workers))
    return [sys.executable, "prepare.py", str(kill_at), *PREPARE, *options]


def state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("kills", [2, pytest.param(24, marks=pytest.mark.long)])
def test_a_killed_process_is_continued_with_the_same_bytes(kills: int) -> None:
    """Kill a process with two workers before several operations on the file system. Its workers exit, too."""
    whole = subprocess.run(command("whole", 10**6, 2), check=True, capture_output=True, text=True)
    operations = 10**6 - int(whole.stdout.split()[-1])
    for place in range(kills):
        kill_at = (1 + place % 2) * operations // (2 * kills)  # together fewer than all operations
        killed = subprocess.run(command("out", kill_at, 2), capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        deadline = time.monotonic() + 20
        while any(state(pid) != "Z" for pid in killed.stdout.split()[1:]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finished = subprocess.run(command("out", 10**6, 2), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert contents("out") == contents("whole")


@pytest.mark.ci
def test_a_killed_worker_is_one_line(processes: list[subprocess.Popen[bytes]]) -> None:
    process = subprocess.Popen(command("out", 10**6, 2), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    processes.append(process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (Path("out/train_000000.bin").exists() and len(children.read_text().split()) > 2):
        assert process.poll() is None
        time.sleep(0.002)
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"jaxgpt: a worker process was killed, perhaps because memory ran out" in err
    assert b"Traceback" not in err
