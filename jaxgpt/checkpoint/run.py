"""Run directory: created atomically, with one writer, and replaced without a moment in which weights can be lost.

config.json             settings; written last: the run exists
tokenizer.json
generation_config.json  special tokens, if the tokenizer has any; so is tokenizer_config.json
checkpoints/            see store.py
metrics.jsonl           losses and speed by step
baselines.json          losses of n-grams
loss.png
.lock                   held by the process that writes
.new/, .replaced/       new and old run, while `--overwrite` replaces one with the other
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from jaxgpt.config import Config, from_json, to_json
from jaxgpt.data import Tokenizer, load_tokenizer
from jaxgpt.data.tokenizer_files import GENERATION, TOKENIZER, save_tokenizer
from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.files import read_bytes, sole_writer, write_atomically

NEW, REPLACED = ".new", ".replaced"
# Files of a run. config.json is moved out first and moved in last: a directory with a config.json contains a complete run.
OUTPUTS = ("metrics.jsonl", "baselines.json", "loss.png")
FILES = ("config.json", "tokenizer.json", "checkpoints", GENERATION, TOKENIZER, *OUTPUTS)


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
        """Read the settings of the run."""
        return from_json(read_bytes(self.path / "config.json"), str(self.path / "config.json"))

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer of the run."""
        return load_tokenizer(self.path / "tokenizer.json")

    def exists(self) -> bool:
        """Return whether the directory contains a run.

        Raises:
            UserError: if a process was killed while it replaced the run.
        """
        exists, replaced = (self.path / "config.json").exists(), self.path / REPLACED
        if not exists and (replaced / "config.json").exists():
            raise UserError(
                f"replacing {self.path} was interrupted: move the files of {replaced} back over its files, or delete it"
            )
        return exists


def parse_checkpoint(init_from: str) -> tuple[Path, str]:
    """Split `--init-from`, RUN or RUN/checkpoints/STEP, into the run and the checkpoint: `best` or STEP."""
    path = Path(init_from)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return path.parent.parent, path.name
    return path, "best"


def open_run(path: Path) -> Run:
    """Open an existing run.

    Raises:
        UserError: if `path` is not a run.
    """
    run = Run(path)
    if not path.is_dir():
        raise UserError(f"no run at {path}{runs_near(path)}: a directory that `jaxgpt train` wrote is expected")
    missing = [name for name in FILES[:3] if not run.exists() or not (path / name).exists()]
    if missing and any(path.glob("*.safetensors")):
        base = " --init-from BASE" if (path / "adapter_config.json").exists() else ""
        raise UserError(f"{path} is a model of another library, not a run: import it: jaxgpt import {path} RUN{base}")
    if missing:
        raise UserError(f"{path} is not a run: it has no {missing[0]} (expected: {', '.join(FILES[:3])})")
    return run


def runs_near(path: Path) -> str:
    """Return " (did you mean RUN?)" or the newest runs next to a path and in runs/, or "" without runs."""
    found = {
        file.parent: file.stat().st_mtime for home in (path.parent, Path("runs")) for file in home.glob("*/config.json")
    }
    runs = sorted((str(each) for each in found if Run(each).checkpoints.is_dir()), key=lambda name: -found[Path(name)])
    return did_you_mean(str(path), runs) or (f" (there are {', '.join(runs[:5])})" if runs else "")


@contextmanager
def new_run(out: str, config: Config, tokenizer: Tokenizer, overwrite: bool = False) -> Iterator[Run]:
    """Create a run in `out`, or in the first unused one of `runs/PRESET`, `runs/PRESET-2`, ..., and lock it in the context.

    The directory appears with its settings: a process killed at any moment leaves no run, or a run that can be resumed.

    Raises:
        UserError: if `out` contains a run and `overwrite` is not set, or if it cannot be written.
    """
    names = (f"{config.preset}-{number}" if number > 1 else config.preset for number in count(1))
    with ExitStack() as lock:
        for path in [Path(out)] if out else (Path("runs") / name for name in names):
            if out or not path.exists():
                try:
                    with _draft(path, config, tokenizer, overwrite, lock) as draft:
                        if not path.exists():
                            lock.enter_context(sole_writer(draft.path))  # the lock moves with the directory
                    break
                except UserError:
                    if out or not path.exists():
                        raise  # otherwise another process has just created a run here: try the next name
        yield Run(path)


@contextmanager
def complete_run(path: Path, config: Config, tokenizer: Tokenizer, overwrite: bool = False) -> Iterator[Run]:
    """Yield a draft of a run, which appears at `path` if the context ends without an error.

    Raises:
        UserError: if `path` contains a run and `overwrite` is not set, or if it cannot be written.
    """
    with ExitStack() as lock, _draft(path, config, tokenizer, overwrite, lock) as draft:
        yield draft


def check_free(path: Path, overwrite: bool) -> None:
    """Check that a run can be created in a directory. Unrelated files may be there, and are kept.

    Raises:
        UserError: if the directory contains a run and `overwrite` is not set, or checkpoints without a config.json.
    """
    if Run(path).exists():
        if not overwrite:
            raise UserError(f"{path} already holds a run: resume it with --resume, or replace it with --overwrite")
    elif (path / "checkpoints").exists():
        raise UserError(f"{path} holds checkpoints but no config.json: choose another --out")


@contextmanager
def _draft(path: Path, config: Config, tokenizer: Tokenizer, overwrite: bool, lock: ExitStack) -> Iterator[Run]:
    """Yield a draft with settings, and move it to `path` at the end. `lock` holds the lock of an existing directory."""
    check_path(path)
    check_free(path, overwrite)
    inside = path.is_dir()
    draft = path / NEW if inside else path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    if inside:
        lock.enter_context(sole_writer(path))  # without it, the draft is another process's
        check_free(path, overwrite)  # another process may have created a run
    try:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "checkpoints").mkdir(parents=True)
        write_settings(Run(draft), config, tokenizer)
        yield Run(draft)
        if inside:
            _replace(path, draft)
        else:
            draft.rename(path)
    except OSError as e:
        if not inside and path.is_dir():
            raise UserError(f"{path} has just been created by another process; choose another --out") from None
        raise UserError(f"cannot write the run to {path}: {e.strerror or e}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace(path: Path, draft: Path) -> None:
    """Move a draft into a directory by renames, which need no space, and then delete the run that was there."""
    remove_replaced(Run(path))
    (path / REPLACED).mkdir()
    for source, target, names in ((path, path / REPLACED, FILES), (draft, path, FILES[::-1])):
        for name in names:
            if (source / name).exists():
                (source / name).rename(target / name)
    remove_replaced(Run(path))


def remove_replaced(run: Run) -> None:
    """Delete the run that was replaced by this one, if a killed process left it."""
    shutil.rmtree(run.path / REPLACED, ignore_errors=True)


def write_settings(run: Run, config: Config, tokenizer: Tokenizer) -> None:
    """Write the settings and the tokenizer of a run, each file atomically."""
    save_tokenizer(run.path, tokenizer)
    write_atomically(run.path / "config.json", to_json(config))


def check_path(path: Path) -> None:
    """Check that Orbax can read from a path: it expands patterns, and takes a few prefixes for remote file systems.

    Raises:
        UserError: if it cannot.
    """
    if match := re.search(r"[*?[\\]|(gs|s3|az):(?=/)", f"{path.absolute()}/"):
        raise UserError(f"a run cannot be kept at {path}: checkpoints cannot be read from a path with {match[0]!r}")
