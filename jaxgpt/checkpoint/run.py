"""Run directory: the paths of its files, and how commands open it.

config.json             settings; moved in last, so it marks a complete run
tokenizer.json
generation_config.json  ids of special tokens, if any; tokenizer_config.json: their text and the chat template
checkpoints/            see store.py
metrics.jsonl           losses and speed of logged steps, and evaluations
evaluation.json         loss of each validation window in the last evaluation
baselines.json          losses of the uniform and the n-gram models, bytes of text per token
samples.jsonl           answers of each evaluation, with their rewards or divergences
tasks.json              results of tasks
loss.png
profile/                traces of `jaxgpt train --profile`
trackers/               what `jaxgpt follow` has sent to each tracker
.lock                   locked by the writing process
.new/                   a new run while it is written
.replaced/              the old run, until the new run that replaces it has taken a step (train) or is complete (import)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.atomic import write_atomically
from jaxgpt.checkpoint.paths import check_link, runs_near
from jaxgpt.checkpoint.replacement import recover
from jaxgpt.config import Config
from jaxgpt.config_json import from_json, to_json
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import load_saved_tokenizer, save_tokenizer
from jaxgpt.directories import CHECKPOINTS, CONFIG, METRICS, RUN_NEEDED, TOKENIZER
from jaxgpt.errors import UserError
from jaxgpt.files import JSON_BYTES, read_bytes
from jaxgpt.strict_json import parse_json


@dataclass(frozen=True, init=False)
class Run:
    """A run directory: its paths, and functions that read its settings and tokenizer."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def config(self) -> Config:
        """Read the settings of the run. Version 0.1.0 recorded `directory` only in metrics.jsonl."""
        path = self.path / CONFIG
        config = from_json(read_bytes(path), str(path))
        if config.directory:
            return config
        return replace(config, directory=_started_in(self.metrics))

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer of the run."""
        return load_saved_tokenizer(self.path / TOKENIZER)

    def exists(self) -> bool:
        """Return whether the directory contains a run; call `recover` first if a process may have been killed there."""
        return (self.path / CONFIG).exists()


def _started_in(metrics: Path) -> str:
    """Return the directory in the first line of metrics.jsonl, or "" if it is missing."""
    with suppress(OSError, UserError), metrics.open("rb") as file:
        line = parse_json(file.readline(JSON_BYTES), str(metrics))
        directory = line.get("directory", "") if isinstance(line, dict) else ""
        if isinstance(directory, str):
            return directory
    return ""


def open_run(path: Path) -> Run:
    """Open an existing run, after `recover`. Raises `UserError` if `path` is not a run."""
    recover(path)
    run = Run(path)
    check_link(path)
    if not path.is_dir():
        raise UserError(f"no run at {path}{runs_near(path)}: expected a run directory, as written by `jaxgpt train`")
    absent = [name for name in RUN_NEEDED if not (path / name).exists()]
    if absent:
        raise _not_a_run(run, absent)
    return run


def _not_a_run(run: Run, absent: Sequence[str]) -> UserError:
    """Return the error for a directory that lacks files of a run: an exported model, a run without checkpoints, or neither."""
    path = run.path
    if any(path.glob("*.safetensors")):
        base = " --init-from BASE" if (path / "adapter_config.json").exists() else ""
        return UserError(f"{path} is a model of a different library, not a run: use jaxgpt import {path} RUN{base}")
    if absent == [CHECKPOINTS]:
        fix = f"restore it, or start again from step 0: jaxgpt train {path / 'config.json'} --out NEW"
        return UserError(f"{run.checkpoints} is missing: {fix}")
    return UserError(f"{path} is not a run: it has no {absent[0]} (expected: {', '.join(RUN_NEEDED)})")


def write_settings(run: Run, config: Config, tokenizer: Tokenizer) -> None:
    """Write the settings and the tokenizer of a run, each file atomically."""
    save_tokenizer(run.path, tokenizer)
    write_atomically(run.path / CONFIG, to_json(config))
