"""What is asked of the machine itself."""

from __future__ import annotations

import sys

import pytest

from jaxgpt.config import Config
from jaxgpt.parallel import host
from jaxgpt.presets import preset


class Libc:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}

    def mallopt(self, parameter: int, value: int) -> int:
        self.told[parameter] = value
        return 1


@pytest.mark.parametrize(
    ("config", "kept"), [(preset("nanogpt-cpu"), False), (preset("python-char"), True), (preset("gpt2"), True)]
)
def test_memory_is_kept_where_glibc_would_give_it_back(
    config: Config, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = Libc()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(host, "_cores", lambda: 2)
    host.keep_memory(config)
    assert libc.told == ({host.M_MMAP_MAX: 0, host.M_TRIM_THRESHOLD: -1, host.M_ARENA_MAX: 1} if kept else {})


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: object())
    host.keep_memory(preset("gpt2"))
