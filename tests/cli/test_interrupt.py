"""Ctrl-C ends a command within a second, even where Python cannot raise KeyboardInterrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

CODE = """
import hashlib
from jaxgpt import cli

def command(words):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour, during which other threads run

cli.main = command
cli.entry()
"""


def test_native_code_is_not_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "jaxgpt: interrupted\n")
    assert process.returncode == 130
