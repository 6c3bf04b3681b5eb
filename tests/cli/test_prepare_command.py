"""jaxgpt data prepare: the command, kills, and what it writes when something is wrong."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from helpers import TEXT, jaxgpt

from jaxgpt.cli.data_prepare import UNITS, _parse_count
from jaxgpt.data.tokenizer import train_bpe
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


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def test_prepared_data_is_described() -> None:
    result = jaxgpt(*PREPARE, "--out", "out", "--shard-tokens", "10k", "--val-fraction", "0.05")
    assert result.code == 0, result.err
    assert "documents" in result.out
    assert result.out.endswith("jaxgpt train --data.path out\n")
    index = json.loads(
        jaxgpt(*PREPARE, "--out", "out", "--shard-tokens", "10_000", "--val-fraction=0.05", "--json").out
    )
    assert index["splits"]["train"]["shards"][0]["tokens"] == 10_000
    report = json.loads(jaxgpt("data", "report", "out", "--json").out)
    for split in ("train", "val"):
        assert report["train_tokens" if split == "train" else "validation_tokens"] == index["splits"][split]["tokens"]
    refused = jaxgpt("train", "--data.path", "out", "--data.tokenizer", "char", "--out", "other")
    assert refused.code == 2
    assert "out was prepared with the tokenizer tokenizer.json, not char: leave out --data.tokenizer" in refused.err


@pytest.mark.ci
def test_prepared_data_is_trained_on() -> None:
    assert jaxgpt(*PREPARE, "--out", "out", "--val-fraction", "0.05").code == 0
    small = ("--model.n-layer=1", "--model.n-head=1", "--model.n-embd=8", "--model.block-size=16", "--train.steps=2")
    trained = jaxgpt(
        "train", "--data.path", "out", "--data.documents", "mask", *small, "--train.batch-size=2", "--out=run"
    )
    assert trained.code == 0, trained.err
    assert json.loads(Path("run/config.json").read_text())["data"]["tokenizer"] == "out/tokenizer.json"
    assert jaxgpt("eval", "run").code == 0


@pytest.mark.parametrize("number", ["0.1", "8.2", "16.4", "1000", "1e2", "0.000001"])
def test_decimal_counts_are_exact(number: str) -> None:
    for unit, size in UNITS.items():
        exact = Fraction(number) * size
        if exact.denominator == 1:
            assert _parse_count("--shard-tokens", number + unit) == exact
        else:
            with pytest.raises(UserError, match="must be a number of tokens"):
                _parse_count("--shard-tokens", number + unit)


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "snan", "1e999999999", "", "M", "1..2"])
def test_what_is_no_count_is_refused_at_once(word: str) -> None:
    with pytest.raises(UserError, match="must be a number of tokens"):
        _parse_count("--shard-tokens", word)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data", "prepare", "src"), "missing option: --out DIR"),
        (("data", "prepare", "--out", "out"), "missing argument: SRC... (usage: jaxgpt data prepare SRC... [OPTIONS])"),
        (("data", "prepare", "src", "more", "--out", "out"), "no such file or folder: more"),
        (
            (*PREPARE, "--out", "out", "--shard-tokens", "many"),
            "--shard-tokens must be a number of tokens, such as 100M",
        ),
        ((*PREPARE, "--out", "out", "--shard-tokens", "0.5"), "--shard-tokens must be a number of tokens"),
        ((*PREPARE, "--out", "out", "--on-error", "ignore"), "--on-error must be one of fail, skip, not 'ignore'"),
        ((*PREPARE, "--out", "src"), "--out src is inside the source src"),
        ((*PREPARE, "--out", "tokenizer.json"), "cannot write to tokenizer.json: File exists"),
        ((*PREPARE, "--out", "."), "is not empty and was not written by jaxgpt data prepare"),
        (("data",), "jaxgpt data is not complete: use data prepare or data report"),
        (("data", "src"), "no command 'data src': use data prepare or data report"),
        (("tokenize",), "did you mean jaxgpt data prepare SRC --out DIR?"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str) -> None:
    before = contents("src"), sorted(Path().iterdir())
    result = jaxgpt(*words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert (contents("src"), sorted(Path().iterdir())) == before


def test_a_second_writer_is_refused() -> None:
    Path("out").mkdir()
    with sole_writer(Path("out")):
        result = jaxgpt(*PREPARE, "--out", "out")
        assert result.code == 2
        assert f"out is being written by process {os.getpid()}" in result.err
        assert [path.name for path in Path("out").iterdir()] == [".lock"]


def test_a_full_disk_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 5000)
    monkeypatch.setattr("jaxgpt.data.prepare.SAVE_EVERY", -1.0)
    assert jaxgpt(*PREPARE, "--out", "whole").code == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        result = jaxgpt(*PREPARE, "--out", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.code == 1
    assert result.err == "jaxgpt: cannot write out/train_000000.bin.part: File too large\n"
    assert json.loads(Path("out/index.json").read_text())["progress"]["splits"]["train"]["tokens"] > 1000
    again = jaxgpt(*PREPARE, "--out", "out")
    assert "resuming out after" in again.err
    assert contents("out") == contents("whole")


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def command(out: str, workers: int) -> list[str]:
    options = ("--out", out, "--shard-tokens", "3000", "--workers", str(workers))
    code = "import sys, jaxgpt.data.documents as d, jaxgpt.data.prepare as p; d.BLOCK = 2000; p.SAVE_EVERY = 0.05; "
    code += "from jaxgpt.cli import main; from pathlib import Path; import time\n"
    code += "add = p._Writers.add\ndef slow(*args): time.sleep(0.06); add(*args)\np._Writers.add = slow\n"
    code += "if __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    Path("prepare.py").write_text(code)
    return [sys.executable, "prepare.py", *PREPARE, *options]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = list[subprocess.Popen[bytes]]()
    yield started
    for process in started:
        process.kill()
        process.wait()


def saved_tokens(folder: str) -> int:
    path = Path(folder, "index.json")
    splits = json.loads(path.read_text()).get("progress", {}).get("splits", {}) if path.exists() else {}
    return sum(split["tokens"] for split in splits.values())


@pytest.mark.ci
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_kills_at_random_moments_change_nothing(workers: int, processes: list[subprocess.Popen[bytes]]) -> None:
    assert subprocess.run(command("whole", 1), check=True, capture_output=True).returncode == 0
    chosen, kills = random.Random(workers), 0
    while True:
        saved = saved_tokens("out")
        process = subprocess.Popen(command("out", workers), stderr=subprocess.PIPE)
        processes.append(process)
        begun, wait = time.monotonic(), chosen.uniform(0.0, 0.8)
        while process.poll() is None and time.monotonic() - begun < wait:
            if kills % 3 and saved_tokens("out") == saved:  # every third time, do not wait for progress
                begun = time.monotonic()
            time.sleep(0.01)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        assert kills < 60
    assert process.returncode == 0
    assert kills > 1
    assert contents("out") == contents("whole")


@pytest.mark.ci
def test_workers_end_with_their_parent(processes: list[subprocess.Popen[bytes]]) -> None:
    process = subprocess.Popen(command("out", 2))
    processes.append(process)
    while not (Path("out/train_000000.bin").exists() and len(found := children(process)) > 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.ci
def test_a_killed_worker_is_one_line(processes: list[subprocess.Popen[bytes]]) -> None:
    process = subprocess.Popen(command("out", 2), stderr=subprocess.PIPE)
    processes.append(process)
    while not (Path("out/train_000000.bin").exists() and len(children(process)) > 2):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(children(process)[-1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"jaxgpt: a worker process was killed, perhaps because memory ran out" in err
    assert b"Traceback" not in err
