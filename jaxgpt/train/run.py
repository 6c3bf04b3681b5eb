"""A run directory: config.json, tokenizer.json, metrics.jsonl, loss.png, checkpoints/."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.config import Config, UserError, from_json, to_json
from jaxgpt.data import Tokenizer, load_tokenizer
from jaxgpt.strict import read_bytes


@dataclass(frozen=True)
class Run:
    """Paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        return self.path / "loss.png"

    def config(self) -> Config:
        """The run's settings."""
        return from_json(read_bytes(self.path / "config.json"), str(self.path / "config.json"))

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return load_tokenizer(self.path / "tokenizer.json")


def open_run(path: Path) -> Run:
    """An existing run.

    Raises:
        UserError: nothing there, or something else.
    """
    if not path.is_dir():
        raise UserError(f"no run at {path}: a folder that `jaxgpt train` wrote is expected")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise UserError(f"{path} is no run: it has no {name} (expected: config.json, tokenizer.json, checkpoints/)")
    return Run(path)


def new_run(out: str, preset: str, overwrite: bool = False) -> Run:
    """A folder for a new run: `out`, or without one `runs/PRESET`, `runs/PRESET-2`, ... whichever is free.

    Raises:
        UserError: there is a run already and it is not to be replaced, or no run where one is, or the folder cannot be
            written.
    """
    if out:
        path = Path(out)
        if not overwrite:
            check_free(path)
        elif path.is_dir() and not (path / "config.json").is_file():
            raise UserError(f"--overwrite replaces a run, and {path} is none")
        _make(path, exist_ok=True)
        return Run(path)
    number = 1
    while True:
        path = Path("runs") / (preset if number == 1 else f"{preset}-{number}")
        if not path.exists():
            try:
                _make(path, exist_ok=False)
                return Run(path)
            except FileExistsError:
                pass  # another process took it in between
        number += 1


def check_free(path: Path) -> None:
    """Whether a new run can begin in a folder.

    Raises:
        UserError: there is one already.
    """
    if (path / "config.json").exists() or (path / "checkpoints").exists():
        raise UserError(f"{path} already holds a run: go on with --resume, or replace it with --overwrite")


def remove_run(path: Path) -> None:
    """Delete what a run wrote, and nothing else. The caller has made sure that there is one."""
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    for name in ("metrics.jsonl", "loss.png", "tokenizer.json", "config.json"):
        (path / name).unlink(missing_ok=True)


def describe(run: Run, config: Config, tokenizer: Tokenizer) -> None:
    """Write what a run is: config.json and tokenizer.json, each whole or not at all."""
    write_atomically(run.path / "tokenizer.json", tokenizer.to_json())
    write_atomically(run.path / "config.json", to_json(config))


def write_atomically(path: Path, text: str) -> None:
    """A file that is there whole or not at all, also if the power fails."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _make(path: Path, exist_ok: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except FileExistsError:
        if not exist_ok and path.is_dir():
            raise
        raise UserError(f"cannot write the run to {path}: a file is in the way") from None
    except OSError as e:
        raise UserError(f"cannot write the run to {path}: {e.strerror}") from None
