"""jaxgpt data prepare: the command, kills, and its error messages."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TEXT, jaxgpt

from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.locks import sole_writer

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
    result = jaxgpt(*PREPARE, "--out", "out", "--shard-tokens", "10000", "--val-fraction", "0.05")
    assert result.code == 0, result.err
    val, train = (
        int(re.search(rf"{split} .* ([\d,]+) tokens", result.out)[1].replace(",", "")) for split in ("val", "train")
    )
    assert f"{val / (val + train):.2%} of the tokens; fewer than 50 windows" in result.out
    assert result.out.endswith("jaxgpt train --data.path out\n")
    again = jaxgpt(*PREPARE, "--out", "out", "--shard-tokens", "10000", "--val-fraction=0.05", "--json")
    index = json.loads(again.out)
    assert index["splits"]["train"]["shards"][0]["tokens"] == 10_000
    report = json.loads(jaxgpt("data", "report", "out", "--json").out)
    assert report["train_tokens"] == index["splits"]["train"]["tokens"]
    assert report["validation_tokens"] == index["splits"]["val"]["tokens"]


def test_a_second_writer_is_rejected() -> None:
    Path("out").mkdir()
    with sole_writer(Path("out")):
        result = jaxgpt(*PREPARE, "--out", "out")
        assert result.code == 2
        assert f"out is being written by process {os.getpid()}" in result.err
        assert contents("out") == {}


def test_a_kill_during_the_first_write_of_the_index_is_continued() -> None:
    """A directory with only the index's temporary file is continued, not rejected as written by another program."""
    kill = "import os, pathlib, sys; from jaxgpt.cli import main; pathlib.Path.replace = lambda *_: os._exit(9); "
    command = [sys.executable, "-c", f"{kill} main(sys.argv[1:])", *PREPARE, "--out", "out"]
    assert subprocess.run(command, check=False).returncode == 9
    assert any(path.name.endswith("tmp") for path in Path("out").iterdir())
    for out in ("out", "whole"):
        assert jaxgpt(*PREPARE, "--out", out).code == 0
    assert contents("out") == contents("whole")


def test_a_full_disk_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.prepared.writing.SAVE_EVERY", -1.0)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    assert jaxgpt(*PREPARE, "--out", "whole").code == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        result = jaxgpt(*PREPARE, "--out", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.code == 1
    assert result.err == "jaxgpt: cannot write out: File too large; raise the limit on file sizes (ulimit -f)\n"
    assert json.loads(Path("out/index.json").read_text())["splits"]["train"]["tokens"] > 1000
    again = jaxgpt(*PREPARE, "--out", "out")
    assert "continuing out after" in again.err
    assert contents("out") == contents("whole")


SCRIPT = """
import os, signal, sys
from jaxgpt.cli import main
from jaxgpt.data.prepared import piece_batches, shard_writer, text_portions, writing

text_portions.BLOCK = 2000
piece_batches.BATCH = 2000
writing.SAVE_EVERY = -1.0
left = int(sys.argv[1])

def killing(operation, half=lambda *args: None):
    def run(*args):
        global left
        left -= 1
        if left == 0:
            half(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args)
    return run

def half(writer, ids):
    write(writer, ids[: len(ids) // 4 * 2])
    writer.sync()

write = shard_writer.ShardWriter.write
shard_writer.ShardWriter.write = killing(write, half)
os.fsync, os.replace = killing(os.fsync), killing(os.replace)
code = main(sys.argv[2:])
print(left)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("style", "kills"),
    [("llm.c", 2), *(pytest.param(style, 24, marks=pytest.mark.long) for style in ("llm.c", "nanogpt"))],
)
def test_a_killed_process_is_continued_with_the_same_bytes(style: str, kills: int) -> None:
    """Kill a process with two threads before or during several file-system operations."""

    def run(out: str, kill_at: int = 10**6) -> subprocess.CompletedProcess[str]:
        options = ("--out", out, "--format", style, "--shard-tokens", "3000", "--workers", "2")
        words = [sys.executable, "-c", SCRIPT, str(kill_at), *PREPARE[:-2], *options]
        return subprocess.run(words, capture_output=True, text=True)

    operations = 10**6 - int(run("whole").stdout.split()[-1])
    for place in range(kills):
        killed = run("out", (1 + place % 2) * operations // (2 * kills) + place % 5)  # in total, not all operations
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = run("out")
    assert finished.returncode == 0, finished.stderr
    assert contents("out") == contents("whole")
