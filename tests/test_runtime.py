"""The process before JAX starts: compiler flags, the cache of compiled programs, and the heap."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt import cli
from jaxgpt.downloads import cache_dir
from jaxgpt.runtime import keep_compiled

VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the environment of a command, without settings of caches."""
    called: list[list[str]] = []
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "CACHE" not in k})
    monkeypatch.setattr(cli, "main", lambda args: called.append(args) or 0)
    monkeypatch.setattr(cli, "exit_on_signals", lambda: None)  # other tests send signals to this process
    return called


def test_the_compilation_cache_is_on_by_default(words: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxgpt", "presets"])
    with pytest.raises(SystemExit, match="0"):
        cli.entry("train")
    assert words == [["train", "presets"]]
    assert Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent == cache_dir() / "compiled"


def test_commands_run_without_a_cache_that_cannot_be_used(
    words: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(sys, "argv", ["jaxgpt", "presets"])
    with pytest.raises(SystemExit, match="0"):
        cli.entry()
    assert words == [["presets"]]


def test_cache_settings_of_the_user_are_respected(words: list[list[str]]) -> None:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = "elsewhere"
    keep_compiled()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"
    # Other programs use that directory without a size limit, and so without the access times that a limit needs.
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ


@pytest.mark.ci
def test_processes_share_compiled_programs(tmp_path: Path) -> None:
    """Damaged programs in the shared directory are compiled again."""
    program = (
        "from jaxgpt.runtime import keep_compiled; keep_compiled()\n"
        "import jax\n"
        "from jax._src import monitoring\n"
        "events = []\n"
        "monitoring.register_event_listener(lambda name, **_: events.append(name))\n"
        "print(jax.jit(lambda x: x * 2 + 1)(jax.numpy.arange(3.0)))\n"
        "print(sum(name.endswith('cache_hits') for name in events) > 0)\n"
    )
    env = {k: v for k, v in os.environ.items() if "CACHE" not in k} | {"JAXGPT_CACHE": str(tmp_path)}

    def run() -> tuple[list[str], str]:
        result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        return result.stdout.split("\n")[:2], result.stderr

    def kept() -> list[Path]:
        return sorted((tmp_path / "compiled").rglob("*-cache"))

    assert run() == (["[1. 3. 5.]", "False"], "")
    assert run() == (["[1. 3. 5.]", "True"], "")
    for file in kept():
        file.write_bytes(file.read_bytes()[:-1])
    (value, _), warnings = run()
    assert value == "[1. 3. 5.]"
    assert warnings.count("Error reading persistent compilation cache entry") == len(kept()) > 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="the heaps are glibc's")
def test_threads_have_no_separate_heap() -> None:
    """A second heap has 9x the page faults and makes steps 10% slower."""
    code = (
        "import ctypes, threading; from jaxgpt.heap import tune_memory; libc = ctypes.CDLL(None)\n"
        "tune_memory(); thread = threading.Thread(target=libc.malloc, args=(1000,))\n"
        "thread.start(); thread.join(); libc.malloc_stats()"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Arena 0" in result.stderr
    assert "Arena 1" not in result.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the heap is glibc's")
def test_freed_memory_is_returned_to_the_kernel() -> None:
    """Freed blocks between blocks in use would otherwise add to the peak memory of a run."""
    code = (
        "from pathlib import Path; from jaxgpt.heap import M_MMAP_MAX, M_TRIM_THRESHOLD, set_malloc, trim_memory\n"
        "def mib(): return int(Path('/proc/self/statm').read_text().split()[1]) * 4096 >> 20\n"
        "set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})\n"
        "blocks = [b'x' * 2**20 for _ in range(200)]; del blocks[::2]\n"
        "before = mib(); trim_memory(); print(before - mib())"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(result.stdout) >= 90
