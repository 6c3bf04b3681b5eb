"""Subject of a command: the config of a preset or run with the settings of the command line, or the model of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import note
from jaxgpt.cli.progress import progress
from jaxgpt.config import Config, MeshConfig, from_json
from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.files import read_bytes
from jaxgpt.presets import DEFAULT, PRESETS, preset

if TYPE_CHECKING:
    from jaxgpt.lm import LM


def named_config(target: str) -> Config:
    """Return the config of a preset or run; empty: of the default preset.

    The name of a preset means the preset. A note is printed if there is such a path.

    Raises:
        UserError: if there is no such preset or run.
    """
    if target in ("", *PRESETS):
        if target and Path(target).exists():
            note(f"{target} is the preset: for the file or directory of this name, write ./{target}")
        return preset(target or DEFAULT)
    from jaxgpt.checkpoint.run import open_run, runs_near

    if not Path(target).exists():
        near = did_you_mean(target, PRESETS) or runs_near(Path(target))
        raise UserError(f"no preset or run {target!r}{near}; jaxgpt presets lists the presets")
    return open_run(Path(target)).config()


def config_file(name: str) -> Config:
    """Read settings from a file."""
    path = Path(name)
    if path.is_dir():
        raise UserError(f"--config {name} is a directory; to repeat a run: jaxgpt train {name} --out NEW")
    config = from_json(read_bytes(path), name)
    # The preset's name becomes a directory name, but a file may contain any string.
    return replace(config, preset=config.preset if config.preset in PRESETS else "custom")


def with_settings(base: Config, settings: Mapping[str, Any]) -> Config:
    """Lay the settings of a command line over a config, and name the matrices that LoRA adapts.

    Raises:
        UserError: if a setting is empty or invalid, or the settings do not fit.
    """
    for name, example in (("data.path", "my.txt"), ("data.mix", "web=0.7 code=0.3")):
        if name in settings and not settings[name]:
            raise UserError(f"--{name} is empty: give it a value, such as --{name} {example}, or leave it out")
    config = base.with_settings(settings)
    if not config.lora.rank:
        return config
    from jaxgpt.convert.peft import resolve_targets

    return replace(config, lora=replace(config.lora, targets=resolve_targets(config.model, config.lora)))


def with_vocab(config: Config) -> Config:
    """Set the vocabulary size of a config from its data."""
    from jaxgpt.data import vocab_size

    return config.with_model(vocab_size=vocab_size(config))


def load_model(run: str, checkpoint: str, weights: str | None = None) -> LM:
    """Load the model of a run on one device."""
    use_one_device()
    from jaxgpt.lm import load

    with progress("loading"):
        return load(run, checkpoint, weights)  # type: ignore[arg-type]


def use_one_device() -> None:
    """Use all cores as one device. Call this before JAX uses a device."""
    from jaxgpt.parallel.host import use_cores

    use_cores(MeshConfig(data=1))


def note_if_empty(lm: LM, prompts: Sequence[str]) -> None:
    """Print a note if a prompt is empty."""
    from jaxgpt.lm.arguments import start_ids

    if not all(prompts):
        note(f"the prompt is empty: generation starts from {start_ids(lm.tokenizer)[1]}")
