"""Code shared by all commands: usage, arguments, options, help, and printing."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxgpt.cli.help import help_text, wrap
from jaxgpt.cli.options import HELP, build, options, read
from jaxgpt.cli.suggest import unknown_option
from jaxgpt.config import Config, DataConfig, LoraConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, UserError
from jaxgpt.config import did_you_mean as did_you_mean
from jaxgpt.presets import DEFAULT, PRESETS, preset

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The sections of a config. Base class of the options of commands that take a whole config."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    mesh: MeshConfig
    lora: LoraConfig


S = TypeVar("S", bound=Settings)
SECTIONS = tuple(field.name for field in fields(Settings))


@dataclass(frozen=True)
class Command:
    """One of the commands of `jaxgpt`.

    Attributes:
        name: as in `jaxgpt NAME`.
        arguments: names of the positional arguments, optional ones in brackets; a word in lower case stands for itself. `...`
            at the end: one or more of the last argument; after a word in lower case, all arguments from this word on.
        about: description for the help.
        examples: example command lines for the help.
    """

    name: str
    arguments: str
    about: str
    examples: Sequence[str]

    @property
    def usage(self) -> str:
        rest = self._rest
        parts = ("jaxgpt", self.name, "[OPTIONS]" * rest, self.arguments, "[OPTIONS]" * (not rest))
        return " ".join(filter(None, parts))

    def read(self, cls: type, args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Parse the command line. With -h or --help, print the help and exit.

        Args:
            cls: dataclass of the options.
            args: arguments after the name of the command.

        Returns:
            Positional arguments ("" for a missing optional one), and the values of the given options by dotted name.

        Raises:
            UserError: an unknown option, a value of the wrong type, or a missing or unexpected argument.
            SystemExit: after printing the help.
        """
        flags = [flag for option in options(cls) for flag in option.flags]
        names = self.arguments.removesuffix(" ...").split()
        expected, rest = sys.maxsize if self.arguments.endswith("...") else len(names), list[str]()
        if self._rest:
            at = args.index(names[0]) if names[0] in args else len(args)
            expected, args, rest = 0, args[:at], list(args[at:])
        if any(word in HELP for word in args):
            print(self._help(cls, args), flush=True)
            raise SystemExit(0)
        arguments, given = read(cls, args, lambda flag: unknown_option(flag, flags, self.name))
        if len(arguments) > expected:
            raise UserError(f"unexpected argument {arguments[expected]!r} (usage: {self.usage})")
        arguments += rest
        for name, word in zip(names, arguments, strict=False):
            if name.islower() and word != name:
                raise UserError(f"expected {name!r}, not {word!r} (usage: {self.usage})")
        for name in names[len(arguments) :]:
            if not name.startswith("["):
                taken = [
                    option.replace("_", "-") for option, value in given.items() if isinstance(value, tuple) and value
                ]
                hint = f"put it before --{taken[-1]}, which takes several values; " if taken else ""
                raise UserError(f"missing argument: {name} ({hint}usage: {self.usage})")
        return arguments + [""] * (len(names) - len(arguments)), given

    def parse(self, cls: type[T], args: Sequence[str]) -> tuple[list[str], T]:
        """Parse the positional arguments, and the options into a `cls`.

        Raises:
            UserError, SystemExit: as `read`; UserError if a check of `cls` fails.
        """
        arguments, given = self.read(cls, args)
        return arguments, build(cls, given)

    def parse_settings(self, cls: type[S], args: Sequence[str]) -> tuple[list[str], S, Config]:
        """Parse the positional arguments, and the options into a `cls` and a config.

        The options change the config of the preset or run named by the first argument, or of the default preset.

        Raises:
            UserError, SystemExit: as `parse`; UserError if there is no such preset or run.
        """
        arguments, given = self.read(cls, args)
        return arguments, *with_settings(cls, given, named_config(arguments[0] or DEFAULT))

    @property
    def _rest(self) -> bool:
        """Whether the command accepts all arguments from a word on."""
        return self.arguments.endswith("...") and self.arguments.split()[0].islower()

    def _help(self, cls: type, words: Sequence[str]) -> str:
        paragraphs, default = self.about.split("\n\n"), None
        if issubclass(cls, Settings):
            name = next((word for word in words if word in PRESETS), DEFAULT)
            paragraphs.append(f"Defaults are those of the preset {name}: {PRESETS[name].about}")
            paragraphs.append(f"Presets: {', '.join(PRESETS)}")
            default = _instance(cls, preset(name))
        about = "\n\n".join("\n".join(wrap(" ".join(text.split()))) for text in paragraphs)
        examples = "\n".join(f"  {example}" for example in self.examples)
        return f"usage: {self.usage}\n\n{about}\n\nexamples:\n{examples}\n\n{help_text(cls, default)}"


def with_settings(cls: type[S], given: dict[str, Any], base: Config) -> tuple[S, Config]:
    """Apply options to a config.

    Raises:
        UserError: an invalid value.
    """
    rank = given.get("lora.rank")
    if isinstance(rank, int) and rank < 1:
        raise UserError(f"--lora.rank must be at least 1, not {rank}: leave it out to train all weights")
    base = replace(base, data=other_data(base.data, given))
    parsed = build(cls, given, _instance(cls, base))
    config = replace(base, **{name: getattr(parsed, name) for name in SECTIONS})
    if config.lora.rank:
        from jaxgpt.convert.peft import resolve_targets

        config = replace(config, lora=replace(config.lora, targets=resolve_targets(config.model, config.lora)))
    return parsed, config


def other_data(data: DataConfig, given: dict[str, Any]) -> DataConfig:
    """Drop the path of a preset or run if a mixture is given instead, or its mixture if a path is.

    Raises:
        UserError: an option names no data.
    """
    if given.get("data.mix") == ():
        raise UserError("--data.mix is empty: give paths and weights, such as --data.mix web=0.7 code=0.3")
    if "data.path" in given:
        return data if "data.mix" in given else replace(data, mix=())
    return replace(data, path="") if "data.mix" in given else data


def _instance(cls: type[S], base: Config) -> S:
    return cls(**{name: getattr(base, name) for name in SECTIONS})


def named_config(target: str) -> Config:
    """Return the config of a preset or of a run. A preset's name means the preset, and a note says so if there is such a path.

    Raises:
        UserError: there is no such preset or run.
    """
    if target in PRESETS:
        if Path(target).exists():
            note(f"{target} is the preset: for the file or folder of this name, write ./{target}")
        return preset(target)
    if not Path(target).exists():
        raise UserError(f"no preset or run {target!r}{did_you_mean(target, PRESETS)}; jaxgpt presets lists the presets")
    from jaxgpt.checkpoint.run import open_run

    return open_run(Path(target)).config()


def command_line(*words: str) -> str:
    """Quote a jaxgpt command for a shell."""
    return shlex.join(["jaxgpt", *words])


def path_word(path: Path) -> str:
    """Write a path so that it is not parsed as an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(value, allow_nan=False))


def note(text: str) -> None:
    """Print a line on standard error, which keeps it out of machine-readable output."""
    try:
        print(f"jaxgpt: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:  # the reader closed the pipe, as in `jaxgpt train 2>&1 | head`; keep working
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)
