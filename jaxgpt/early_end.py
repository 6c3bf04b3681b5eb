"""Early end of this process: its last line, with advice such as the command to resume, and the exit itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"  # escape sequences that erase the progress line and show the cursor


@dataclass
class _Advice:
    """The advice for an early end of this process; `current` returns it, or "" for no advice."""

    current: Callable[[], str]


_advice = _Advice(current=str)  # `str()` is "": no advice


def set_advice(advice: Callable[[], str]) -> None:
    """Set the function that returns advice for an early end, such as the kept checkpoint and the resume command."""
    _advice.current = advice


def with_advice(reason: str) -> str:
    """Append the advice for an early end, if any, to its reason."""
    text = _advice.current()
    return f"{reason}: {text}" if text else reason


def exit_now(reason: str, code: int) -> NoReturn:
    """Print a line and end the process, from any thread, without waiting for other threads."""
    with suppress(OSError):  # closed stream
        for stream in (1, 2):
            if os.isatty(stream) and os.environ.get("TERM") not in ("dumb", "unknown"):
                os.write(stream, SHOW_CURSOR)
        os.write(2, f"jaxgpt: {reason}\n".encode())
    os._exit(code)
