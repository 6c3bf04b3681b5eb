"""The options of `jaxgpt train`, and the settings of a new run: from a preset, a file, or a run to repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.cli.inherited_settings import inherited_note, positions_in, unset_of_chats
from jaxgpt.cli.settings import origin, with_settings
from jaxgpt.cli.weights_settings import OF_POSITIONS, SIZES, with_weights
from jaxgpt.config import Config, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.post_settings import DISTILLATION
from jaxgpt.presets import PRESETS


class TrainOptions(NamedTuple):
    """The options of `jaxgpt train` that determine the run and its settings.

    Attributes:
        target: preset, run, or JSON file of settings; "": the default preset.
        base: settings of the target.
        out: run directory; "": a new directory, or the run to resume.
        resume: resume the target or the run in `out`.
        overwrite: replace the run in `out`.
        init_from: run or checkpoint of the initial weights; "": as in the target, or random weights.
        keep_optimizer: also start from the optimizer state of `init_from`.
        settings: settings on the command line, keyed by dotted name.
    """

    target: str
    base: Config
    out: str
    resume: bool
    overwrite: bool
    init_from: str
    keep_optimizer: bool
    settings: Mapping[str, Any]

    @property
    def is_path(self) -> bool:
        """Whether the target is a run or a file, not a preset."""
        return self.target not in ("", *PRESETS)

    @property
    def source(self) -> str:
        """The run to repeat or to resume; "": the target is not a run."""
        return self.target if self.is_path and Path(self.target).is_dir() else ""

    @property
    def directory(self) -> Path:
        """Directory of the run to start or resume; the current directory if `out` and `source` are empty."""
        return Path(self.out or self.source)

    @property
    def named_rewards(self) -> tuple[str, ...]:
        """The rewards on the command line, which may be the user's own code."""
        rewards: tuple[str, ...] = self.settings.get("post.reward", ())
        return rewards

    def check(self) -> None:
        """Raise `UserError` if options contradict each other, or need an option that is missing."""
        source = self.source
        out = self.out
        if self.resume and self.overwrite:
            raise UserError("--resume and --overwrite are mutually exclusive: omit one of them")
        if self.resume and not (out or source):
            raise UserError("--resume needs a run directory: jaxgpt train --resume --out DIR")
        if source and not (out or self.resume):
            raise UserError(f"{source} is a run: repeat its settings with --out NEW, or resume it with --resume")
        if self.keep_optimizer and not self.init_from:
            raise UserError("--keep-optimizer needs the run with the optimizer state: add --init-from RUN")
        if source and self.resume and out and Path(out) != Path(source):
            raise UserError(f"--resume continues one run, not both {source} and --out {out}: omit one of them")


def new_config(options: TrainOptions, note: Callable[[str], None]) -> Config:
    """Return the settings of a new run; `note` receives a line about settings from a different run."""
    if options.source:
        config = _repeated_config(options)
        note(f"using the settings of {options.source}, starting from {origin(config)}")
        return config
    initial = _initial_weights(options)
    if initial.weights:
        return _finetuned_config(options, initial, note)
    return _fresh_config(options.base, options.settings)


class _Initial(NamedTuple):
    """The initial weights of a new run.

    Attributes:
        weights: run, or RUN/checkpoints/STEP; "": random weights.
        keep_optimizer: also start from the optimizer state.
    """

    weights: str
    keep_optimizer: bool


def _initial_weights(options: TrainOptions) -> _Initial:
    """Return the initial weights in the options, otherwise the initial weights of the target."""
    if options.init_from:
        return _Initial(options.init_from, options.keep_optimizer)
    base = options.base
    return _Initial(base.state_from or base.init_from, keep_optimizer=bool(base.state_from))


def _finetuned_config(options: TrainOptions, initial: _Initial, note: Callable[[str], None]) -> Config:
    """Return the settings of a preset or file with initial weights; `note` receives a line about inherited settings."""
    keep: tuple[str, ...] = SIZES if options.is_path else ()
    if not options.init_from:
        keep += positions_in(options.target)  # a file that specifies initial weights also sets their positions

    inherited = [name for name in unset_of_chats(options.target) if f"data.{name}" not in options.settings]
    config = with_weights(
        options.base,
        initial.weights,
        options.settings,
        keep=keep,
        keep_optimizer=initial.keep_optimizer,
        inherited=inherited,
    )
    line = inherited_note(config, inherited, initial.weights)
    if line:
        note(line)
    return config


def _fresh_config(base: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings of a run with random initial weights; raise `UserError` if they need the weights of a run."""
    if base.preset == "finetune" or settings.get("lora.rank", base.lora.rank):
        name = "finetune" if base.preset == "finetune" else "--lora.rank"
        raise UserError(f"{name} needs the weights of a run: add --init-from RUN")
    objective = settings.get("post.objective", base.post.objective)
    is_distillation = objective in DISTILLATION
    if objective != "next-token" and not is_distillation:
        raise UserError(f"post.objective {objective} needs the weights of a run: add --init-from RUN")

    # The prompt of a preset belongs to its text: with a different text, use the default prompt.
    has_own_text = bool({"data.path", "data.mix"} & settings.keys())
    if has_own_text and has_preset_prompt(base):
        settings = {"train.prompt": TrainConfig.prompt, **settings}
    teacher = settings.get("post.reference", base.post.reference)
    if is_distillation and teacher:
        return _distilled_config(base, teacher, settings)
    return with_settings(base, settings)


def has_preset_prompt(config: Config) -> bool:
    """Return whether the prompt of the final sample is the prompt of the preset, which may not suit a different text."""
    preset = PRESETS.get(config.preset)
    return preset is not None and preset.config.train.prompt == config.train.prompt


def _distilled_config(base: Config, teacher: str, settings: Mapping[str, Any]) -> Config:
    """Return the settings of a student with random initial weights and the tokenizer of its teacher.

    Raises:
        UserError: if the teacher is not a run, a setting is invalid, or `data.tokenizer` is set.
    """
    from jaxgpt.checkpoint.paths import parse_checkpoint
    from jaxgpt.checkpoint.run import open_run
    from jaxgpt.post.frozen_reference import with_reference

    path, _ = parse_checkpoint(teacher)
    run = open_run(path)
    if "data.tokenizer" in settings:
        raise UserError("distillation uses the tokenizer of the teacher: omit data.tokenizer")
    tokenizer = str((path / "tokenizer.json").absolute())
    inherited = {"data.tokenizer": tokenizer, "model.vocab_size": run.config().model.vocab_size}
    config = with_settings(base, {**inherited, **settings})
    return with_reference(config, run.tokenizer())


def _repeated_config(options: TrainOptions) -> Config:
    """Return the settings of a run that repeats the target, with the initial weights of `_initial_weights`."""
    from jaxgpt.checkpoint.run import Run

    base = options.base
    settings = options.settings
    initial = _initial_weights(options)
    if initial.weights:
        # The positions of the target belong to its own initial weights.
        keep = SIZES if options.init_from else (*SIZES, *OF_POSITIONS)
        return with_weights(base, initial.weights, settings, keep=keep, keep_optimizer=initial.keep_optimizer)
    if base.model.vocab_size == Run(Path(options.source)).tokenizer().vocab_size:
        base = base.with_model(vocab_size=0)  # 0: determined by the tokenizer of the new run
    return _fresh_config(base, settings)
