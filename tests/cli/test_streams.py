"""Standard output that is full or not read; and text printed verbatim."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt.cli.console import Console

HOSTILE = ":smile: :x: [bold]b[/bold] [link=x]\t|\ttabs \r\f\x1b[0m {0} %s \\n [/] " + "long " * 60
JAXGPT = f"{sys.executable} -m jaxgpt"


def shell(command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, shell=True, capture_output=True, check=False, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["train --help", "--help", "--version"])
def test_a_full_disk_is_one_line(command: str) -> None:
    result = shell(f"{JAXGPT} {command} > /dev/full")
    assert result.returncode == 1
    assert result.stderr == b"jaxgpt: cannot write: No space left on device\n"


def test_the_console_prints_text_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("COLUMNS", "40")
        console = Console()
        assert console.is_terminal == terminal
        console.write(HOSTILE)
        assert out.getvalue() == HOSTILE + "\n"


def test_a_closed_pipe_does_not_stop_the_work(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time; from jaxgpt.cli.console import Console; console = Console()\n"
        "for _ in range(1000): console.write('x' * 1000)\n"
        "pathlib.Path('done').write_text('')\n"
    )
    result = shell(f"{sys.executable} -c {shlex.quote(code)} | head -1")
    assert result.stderr == b""
    assert (tmp_path / "done").exists()
