"""A terminal for commands that run in the test process."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Return a stream that is a terminal, and a function that returns what was written to it."""
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w") as stream, os.fdopen(leader, "rb", buffering=0) as screen:
        yield stream, lambda: (screen.read() or b"").decode()
