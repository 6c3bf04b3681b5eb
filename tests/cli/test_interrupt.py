"""Ctrl-C ends a command within a second, even where Python cannot raise KeyboardInterrupt."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time

import pytest

CODE = """
import hashlib
from jaxgpt import cli

def command(words):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour, during which other threads run

cli.main = command
cli.entry()
"""


def test_ctrl_c_does_not_wait_for_native_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "jaxgpt: interrupted\n")
        assert process.returncode == 130
    finally:
        process.kill()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="the heaps are glibc's")
def test_the_watching_thread_has_no_separate_heap() -> None:
    """A second heap defeats `keep_memory`: nine times the page faults, and steps a tenth slower."""
    code = (
        "import ctypes, threading; from jaxgpt.cli.interrupt import interruptible; libc = ctypes.CDLL(None)\n"
        "with interruptible():\n"
        "    thread = threading.Thread(target=libc.malloc, args=(1000,))\n"
        "    thread.start(); thread.join(); libc.malloc_stats()"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Arena 0" in result.stderr
    assert "Arena 1" not in result.stderr
