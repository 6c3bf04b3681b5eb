"""Flags to dataclasses by tyro, its messages to one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from jaxgpt.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    UserError,
    did_you_mean,
)
from jaxgpt.presets import PRESETS, preset

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The sections of a config, as flags: what commands that take a whole run begin with."""

    model: ModelConfig  # the decoder
    data: DataConfig  # text to windows
    optim: OptimConfig  # gradients to updates
    train: TrainConfig  # the run
    mesh: MeshConfig  # devices


S = TypeVar("S", bound=Settings)


def parse(cls: type[T], args: Sequence[str], prog: str, description: str, default: T | None = None) -> T:
    """Command-line arguments as a `cls`.

    Raises:
        UserError: an unknown flag (with a near one named), or a value of the wrong kind.
        SystemExit: after `--help`.
    """
    known = _flags(cls)
    for arg in args:
        flag = arg.split("=", 1)[0].replace("_", "-")
        if arg.startswith("--") and flag not in known and flag not in ("--", "--help"):
            raise UserError(f"no flag {flag}{did_you_mean(flag, known)}: {prog} --help lists them")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if default is None:
                return tyro.cli(cls, args=list(args), prog=prog, description=description)
            return tyro.cli(cls, args=list(args), prog=prog, description=description, default=default)
    except SystemExit as e:
        if not e.code:
            raise
        raise UserError(_first_sentence(errors.getvalue()) + f": {prog} --help tells more") from None


def parse_settings(cls: type[S], args: Sequence[str], prog: str, description: str, base: Config) -> tuple[S, Config]:
    """Command-line arguments as a `cls`, and `base` with the settings among them.

    Raises:
        UserError, SystemExit: as `parse`.
    """
    sections = [field.name for field in fields(Settings)]
    parsed = parse(cls, args, prog, description, cls(**{name: getattr(base, name) for name in sections}))
    return parsed, replace(base, **{name: getattr(parsed, name) for name in sections})


def named_config(target: str) -> Config:
    """The config of a preset, or of a run directory.

    Raises:
        UserError: it is neither.
    """
    if target in PRESETS or not Path(target).exists():
        return preset(target)
    from jaxgpt.train.run import open_run

    return open_run(Path(target)).config()


def split_target(args: Sequence[str], prog: str) -> tuple[str, Sequence[str]]:
    """The first argument, which is no flag, and the rest."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if "--help" in args or "-h" in args:
        return "", args
    raise UserError(f"what to work on has to come first: {prog} ...")


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, allow_nan=False))


def note(text: str) -> None:
    """A line for the person at the terminal, not for a program that reads the output."""
    print(f"jaxgpt: {text}", file=sys.stderr, flush=True)


def _flags(cls: type, prefix: str = "--") -> list[str]:
    flags = []
    for name, hint in get_type_hints(cls).items():
        flag = prefix + name.replace("_", "-")
        if is_dataclass(hint):
            flags += _flags(hint, flag + ".")  # type: ignore[arg-type]
        else:
            flags.append(flag)
            flags += [prefix + "no-" + name.replace("_", "-")] if hint is bool else []
    return flags


def _first_sentence(box: str) -> str:
    """tyro's message without the box that is drawn around it."""
    lines = [re.sub(r"[│╭╮╰╯─]+", " ", line).strip() for line in box.splitlines()[1:]]
    sentence = []
    for line in lines:
        if not line or line.startswith("─"):
            break
        sentence.append(line)
    return " ".join(sentence).rstrip(".") or "bad arguments"
