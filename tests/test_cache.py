"""What is kept between runs: where, and when not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt import cache, cli

VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the command line is called with, in an environment without a word on caches."""
    called: list[list[str]] = []
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "CACHE" not in k})
    monkeypatch.setattr(cli, "main", lambda args: called.append(args) or 0)
    return called


def test_compiled_programs_are_kept_by_default(words: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxgpt", "presets"])
    with pytest.raises(SystemExit, match="0"):
        cli.entry("train")
    assert words == [["train", "presets"]]
    assert Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent == cache.cache_dir() / "compiled"


def test_no_cache(words: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxgpt", "train", "--no-cache", "--out", "x"])
    with pytest.raises(SystemExit, match="0"):
        cli.entry()
    assert words == [["train", "--out", "x"]]
    assert not any(name in os.environ for name in VARIABLES)


def test_what_the_user_says_of_the_cache_stands(words: list[list[str]]) -> None:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = "elsewhere"
    cache.keep_compiled()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"


def test_another_process_takes_what_one_compiled(tmp_path: Path) -> None:
    """Also from a folder that holds damaged programs: they are compiled again."""
    program = (
        "from jaxgpt.cache import keep_compiled; keep_compiled()\n"
        "import jax\n"
        "from jax._src import monitoring\n"
        "events = []\n"
        "monitoring.register_event_listener(lambda name, **_: events.append(name))\n"
        "print(jax.jit(lambda x: x * 2 + 1)(jax.numpy.arange(3.0)))\n"
        "print(sum(name.endswith('cache_hits') for name in events) > 0)\n"
    )
    env = {k: v for k, v in os.environ.items() if "CACHE" not in k} | {"JAXGPT_CACHE": str(tmp_path)}

    def run() -> list[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], env=env, capture_output=True, text=True, check=True
        ).stdout.split("\n")[:2]

    assert run() == ["[1. 3. 5.]", "False"]
    assert run() == ["[1. 3. 5.]", "True"]
    for file in (tmp_path / "compiled").rglob("*-cache"):
        file.write_bytes(file.read_bytes()[:20])
    assert run()[0] == "[1. 3. 5.]"
