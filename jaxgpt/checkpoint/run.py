"""A run directory: config.json, tokenizer.json, baselines.json, metrics.jsonl, loss.png, checkpoints/.

Runs of imported models also hold generation_config.json and tokenizer_config.json, which name special tokens.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from jaxgpt.config import Config, UserError, from_json, to_json
from jaxgpt.data import Tokenizer, load_tokenizer
from jaxgpt.data.special_tokens import GENERATION, TOKENIZER
from jaxgpt.files import read_bytes, sole_writer, write_atomically

REPLACED = "checkpoints.replaced"  # where `--overwrite` puts the old checkpoints until they are deleted


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

    @property
    def baselines(self) -> Path:
        return self.path / "baselines.json"

    def config(self) -> Config:
        """The run's settings."""
        return from_json(read_bytes(self.path / "config.json"), str(self.path / "config.json"))

    def exists(self) -> bool:
        """Return whether a run has been started here. Starting a run writes config.json last."""
        return (self.path / "config.json").exists()

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return load_tokenizer(self.path / "tokenizer.json")


def parse_checkpoint(init_from: str) -> tuple[Path, str]:
    """Split `--init-from`, a run or one of its checkpoints (RUN/checkpoints/STEP), into the run and `best` or the step."""
    path = Path(init_from)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return path.parent.parent, path.name
    return path, "best"


def open_run(path: Path) -> Run:
    """An existing run.

    Raises:
        UserError: nothing there, or something else.
    """
    if not path.is_dir():
        raise UserError(f"no run at {path}: a folder that `jaxgpt train` wrote is expected")
    adapter = (path / "adapter_config.json").is_file()
    if not (path / "checkpoints").is_dir() and (adapter or any(path.glob("*.safetensors"))):
        kind, option = ("an adapter of PEFT", " --init-from BASE") if adapter else ("a model of transformers", "")
        raise UserError(f"{path} is {kind}, not a run: import it first: jaxgpt import {path} RUN{option}")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise UserError(
                f"{path} is not a run: it has no {name} (expected: config.json, tokenizer.json, checkpoints/)"
            )
    return Run(path)


@contextmanager
def new_run(out: str, config: Config, tokenizer: Tokenizer, overwrite: bool = False) -> Iterator[Run]:
    """Start a run in `out`, or without one in `runs/PRESET`, `runs/PRESET-2`, ..., the first that is free.

    Within the context this process is the run's only writer. A new folder appears with its settings in it, so that a
    process killed at any moment leaves either no folder or a run that `--resume` can continue.

    Raises:
        UserError: `out` holds a run and `overwrite` is not given, or the reverse; or it cannot be written.
    """
    path = Path(out)
    with ExitStack() as stack:
        if out and path.exists():
            check_free(path, overwrite)
            _make(path, path)
            stack.enter_context(sole_writer(path))
            check_free(path, overwrite)  # another process may have started one
            _replace(Run(path), config, tokenizer)
        elif out:
            if not _appear(path, config, tokenizer, stack):
                raise UserError(f"{path} has just been created by another process; choose another --out")
        else:
            names = (f"{config.preset}-{number}" if number > 1 else config.preset for number in count(1))
            free = (path for name in names if not (path := Path("runs") / name).exists())
            path = next(path for path in free if _appear(path, config, tokenizer, stack))
        yield Run(path)


@contextmanager
def complete_run(path: Path, config: Config, tokenizer: Tokenizer, overwrite: bool = False) -> Iterator[Run]:
    """Write a whole run: it appears at `path` when the context is left without an error, or not at all.

    The context gives a draft beside it, with its settings in it. Of a run that is replaced, other files stay.

    Raises:
        UserError: something else is at `path`, or a run and no `overwrite`, or it cannot be written.
    """
    if path.name in ("", ".."):
        raise UserError(f"cannot create {path}: name a new folder")
    old = Run(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    with ExitStack() as stack:
        if old.exists():
            if not overwrite:
                raise UserError(
                    f"{path} already holds a run: choose another path, or pass overwrite=True to replace it"
                )
            stack.enter_context(sole_writer(path))
        elif path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{path} exists and is not a run: choose another path")
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        _make(draft, path)
        try:
            write_settings(Run(draft), config, tokenizer)
            yield Run(draft)
            if old.exists():
                _replace(old, config, tokenizer)
                Run(draft).checkpoints.rename(old.checkpoints)
            else:
                draft.rename(path)
        except OSError as e:
            raise UserError(f"cannot write the run to {path}: {e.strerror or e}") from None


def check_free(path: Path, overwrite: bool) -> None:
    """Check that a run can start in a folder.

    Raises:
        UserError: it holds a run already; or, with `overwrite`, something else.
    """
    if (path / "config.json").is_file():
        if not overwrite:
            raise UserError(f"{path} already holds a run: resume it with --resume, or replace it with --overwrite")
    elif (path / "checkpoints").exists():
        raise UserError(f"{path} holds checkpoints but no config.json: choose another --out")
    elif overwrite and path.is_dir():
        raise UserError(f"--overwrite replaces a run, and {path} holds none (no config.json)")


def _appear(path: Path, config: Config, tokenizer: Tokenizer, stack: ExitStack) -> bool:
    """Create a run's folder in one step, locked until `stack` is closed. False if another process was first."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        _make(draft, path)
        with ExitStack() as own:
            own.enter_context(sole_writer(draft))  # the lock moves with the folder
            write_settings(Run(draft), config, tokenizer)
            try:
                draft.rename(path)
            except OSError as e:
                if path.exists():
                    return False
                raise UserError(f"cannot write the run to {path}: {e.strerror}") from None
            stack.enter_context(own.pop_all())
            return True
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace(run: Run, config: Config, tokenizer: Tokenizer) -> None:
    """Write a new run's settings into an existing folder, and delete what an earlier run wrote, nothing else.

    Killed in between, it never leaves one run's settings with another's checkpoints.
    """
    remove_replaced(run)
    if run.checkpoints.exists():
        run.checkpoints.rename(run.path / REPLACED)
    write_settings(run, config, tokenizer)
    for file in (run.metrics, run.plot, run.baselines):
        file.unlink(missing_ok=True)
    remove_replaced(run)


def remove_replaced(run: Run) -> None:
    """Delete the checkpoints of a run that this one has replaced, if a killed process left any."""
    shutil.rmtree(run.path / REPLACED, ignore_errors=True)


def write_settings(run: Run, config: Config, tokenizer: Tokenizer) -> None:
    """Write a run's settings and tokenizer: config.json, tokenizer.json and what names its special tokens, each atomically."""
    write_atomically(run.path / "tokenizer.json", tokenizer.to_json())
    special = tokenizer.special
    for name, values in ((GENERATION, special.generation), (TOKENIZER, special.tokenizer)):
        if values:
            write_atomically(run.path / name, json.dumps(values, indent=2, allow_nan=False) + "\n")
        else:
            (run.path / name).unlink(missing_ok=True)
    write_atomically(run.path / "config.json", to_json(config))


def check_path(path: Path) -> None:
    """Check that checkpoints can be kept below a path.

    Orbax takes some characters for patterns of file names, and would look elsewhere for what it has written, and a few
    words for other file systems.

    Raises:
        UserError: they cannot.
    """
    if found := re.search(r"[*?[\\]|(gs|s3|az):(?=/)", f"{path.absolute()}/"):
        raise UserError(f"a run cannot be kept at {path}: checkpoints cannot be read from a path with {found[0]!r}")


def _make(folder: Path, path: Path) -> None:
    """Create a folder, if it is not there, in which files of the run at `path` can be written."""
    check_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise UserError(f"cannot write the run to {path}: it is a file, or is below one") from None
    except OSError as e:
        raise UserError(f"cannot write the run to {path}: {e.strerror}") from None
