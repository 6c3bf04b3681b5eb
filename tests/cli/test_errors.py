"""Errors of a command are one line on standard error, even if its libraries print; text is printed verbatim."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from folders import SMALL, run_folder
from helpers import jaxgpt

from jaxgpt.checkpoint.info import read_info, seal
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.cli import main
from jaxgpt.cli.console import Console, note
from jaxgpt.errors import FullDisk, plural, reported


def panicking_tokenizer(run: Path) -> None:
    """A tokenizer that makes the library's Rust code panic and print."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    none = dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}
    value = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model, **none}
    (run / "tokenizer.json").write_text(json.dumps(value))


def test_a_panic_of_the_tokenizers_library_ends_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", SMALL)
    panicking_tokenizer(run)
    assert main(["sample", str(run), "--prompt", "To"]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"jaxgpt: {run}")


def unreadable_arrays(run: Path) -> None:
    resealed(run, "params/manifest.ocdbt", lambda data: data[:50])


def cut_metadata(run: Path) -> None:
    resealed(run, "params/_METADATA", lambda data: data[:500])


def bottomless_metadata(run: Path) -> None:
    resealed(run, "_CHECKPOINT_METADATA", lambda _: b"[" * 100_000)


def resealed(run: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and its recorded checksum, so that Orbax reads the changed file."""
    folder = run / "checkpoints" / "0"
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    seal(folder, read_info(folder))


@pytest.mark.parametrize("damage", [unreadable_arrays, cut_metadata, bottomless_metadata])
def test_standard_error_is_one_line(
    damage: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", SMALL)
    damage(run)
    capfd.readouterr()
    assert main(["sample", str(run), "--prompt", "To", "--max-new-tokens", "2"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("jaxgpt: ")
    assert str(run) in err


@pytest.mark.parametrize(
    ("said", "expected"), [("RESOURCE_EXHAUSTED: no room", "JAX_PLATFORMS=cpu"), ("INTERNAL: x", "")]
)
def test_xla_errors_are_one_line(said: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(f"{said}\nand much more")

    monkeypatch.setattr("jaxgpt.cli.info.named_config", fail)
    result = jaxgpt("info", "gpt2")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith(f"jaxgpt: XLA failed: {said} and much more")
    assert expected in result.err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "jaxgpt: interrupted: the checkpoint of step 4 is kept\n"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            1,
            "jaxgpt: out of memory on the host (Unable to allocate 9 TiB): the checkpoint of step 4 is kept; use a smaller "
            "model or batch, or a machine with more memory\n",
        ),
        (
            FloatingPointError("invalid value (nan) encountered in add\nand more"),
            1,
            "jaxgpt: JAX_DEBUG_NANS or JAX_DEBUG_INFS found a non-finite value: invalid value (nan) encountered in add and "
            "more: the checkpoint of step 4 is kept\n",
        ),
        (
            OSError(28, "No space left on device", "a.txt"),
            1,
            "jaxgpt: cannot write a.txt: No space left on device; free space on its file system\n",
        ),
        (
            FullDisk("cannot write the run to a: No space left on device; free space on its file system"),
            1,
            "jaxgpt: cannot write the run to a: No space left on device; free space on its file system\n",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_early_end_is_one_line(error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("jaxgpt.cli.info.named_config", fail)
    monkeypatch.setattr("jaxgpt.early_end._advice.current", lambda: "the checkpoint of step 4 is kept")
    with jax.debug_nans(True):
        result = jaxgpt("info", "gpt2")
    assert (result.code, result.err) == (code, line)


@pytest.mark.parametrize("error", [FloatingPointError("x"), RecursionError("x"), TypeError("x"), RuntimeError("x")])
def test_a_programming_error_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("jaxgpt.cli.info.named_config", fail)
    with pytest.raises(type(error)):
        main(["info", "gpt2"])


@pytest.mark.parametrize("module", ["rich.console", "cyclopts", "jax"])
def test_ctrl_c_during_an_import_is_one_line(module: str) -> None:
    """The first import of a module sends SIGINT to this process, as if the user pressed Ctrl-C."""
    code = f"""
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["jaxgpt", "eval", "run"]
runpy.run_module("jaxgpt", run_name="__main__")
"""
    run_folder(Path("run"), SMALL)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "jaxgpt: interrupted\n")


def test_a_missing_run_is_reported_before_jax_is_imported() -> None:
    program = """
import sys
from jaxgpt.cli import main
for words in ("sample x", "eval x", "chat x", "explain x", "inspect x", "export x y", "plot x", "info x"):
    assert main(words.split()) == 2
    assert "jax" not in sys.modules, words
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=120)
    assert (result.returncode, result.stderr.count(b"\n")) == (0, 8), result.stderr


HOSTILE = ":smile: :x: [bold]b[/bold] [link=x]\t|\ttabs \r\f\x1b[0m {0} %s \\n [/] " + "long " * 60
JAXGPT = f"{sys.executable} -m jaxgpt"


def shell(command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, shell=True, capture_output=True, check=False, timeout=120)


def test_a_full_disk_is_a_failure_and_no_bad_input() -> None:
    with (
        pytest.raises(FullDisk, match="cannot write a: No space left on device; free space"),
        reported("cannot write a"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["train --help", "--version"])
def test_a_full_disk_is_one_line(command: str) -> None:
    result = shell(f"{JAXGPT} {command} > /dev/full")
    assert result.returncode == 1
    assert result.stderr == b"jaxgpt: cannot write: No space left on device; free space on its file system\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_work_continues_if_its_lines_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log of a long run may be on a full disk, and the checkpoints on a different one."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console = Console()
        console.write("first")
        console.write("second")
    assert capfd.readouterr().err == "jaxgpt: cannot print: No space left on device; continuing without output\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_note_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        note("first")
        note("second")


def test_a_process_ends_with_one_line_and_the_exit_code() -> None:
    """Run the console script, which exits; after `train`, it exits through `exit_process`."""
    result = shell(f"{JAXGPT} train --data.path x")
    assert (result.returncode, result.stderr.count(b"\n")) == (2, 1), result.stderr
    result = shell(f"{JAXGPT} train --data.path x 2>&-")
    assert (result.returncode, result.stdout) == (2, b""), "without standard error"


def test_weights_of_another_shape_are_one_line() -> None:
    """Run a separate process, because Orbax prints some warnings only when its process ends."""
    run = Run(run_folder(Path("run"), SMALL))
    write_settings(run, run.config().with_model(n_embd=16), run.tokenizer())
    result = shell(f"{JAXGPT} eval run")
    assert (result.returncode, result.stderr.count(b"\n")) == (2, 1), result.stderr
    assert result.stderr.startswith(b"jaxgpt: run/checkpoints/0 is damaged or does not match the settings: params (")


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


def test_numbers_have_plural_nouns() -> None:
    assert plural(1, "batch") == "1 batch"
    assert plural(1200, "window") == "1,200 windows"
    assert plural(2, "batch") == "2 batches"
    assert plural(2, "epoch") == "2 epochs"
    assert plural(2, "process") == "2 processes"
    assert plural(2, "directory of text") == "2 directories of text"
    assert plural(2, "day") == "2 days"
