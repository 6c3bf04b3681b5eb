"""The settings of a resumed run, and the options that a resume rejects or ignores."""

from __future__ import annotations

from collections.abc import Collection

from jaxgpt.cli.settings import origin, with_settings
from jaxgpt.cli.train_settings import TrainOptions
from jaxgpt.config import Config
from jaxgpt.config_changes import changes
from jaxgpt.errors import UserError


def resumed_config(options: TrainOptions) -> Config:
    """Return the settings of a run that continues from its last checkpoint.

    Raises:
        UserError: if the run does not exist or is damaged, a setting is invalid, or `_check_resume` rejects an option.
    """
    from jaxgpt.checkpoint.run import open_run

    run = open_run(options.directory)
    old = run.config()
    run.tokenizer()  # integrity check of the tokenizer, even for a finished run
    _check_resume(options, old)

    # The recorded path of the tokenizer means the tokenizer of the run, in any directory.
    settings = dict(options.settings)
    if settings.get("data.tokenizer") == old.data.tokenizer:
        del settings["data.tokenizer"]
    return with_settings(old, settings)


def _check_resume(options: TrainOptions, old: Config) -> None:
    """Raise `UserError` if options change how a resumed run started (preset, weights, optimizer state), or add adapters."""
    from jaxgpt.checkpoint.paths import parse_checkpoint

    path = options.directory
    preset = options.base.preset if options.target and not options.source else ""
    if preset not in ("", old.preset):
        raise UserError(f"{path} is a run of {old.preset!r}, not {preset!r}: omit the preset, or change --out")

    if options.init_from:
        weights, step = parse_checkpoint(options.init_from)
        old_weights, old_step = parse_checkpoint(old.state_from or old.init_from)
        is_same_step = step in ("best", old_step)  # "best": no step is given
        if weights.resolve() != old_weights.resolve() or not is_same_step:
            start = f"{path} started from {origin(old)}"
            raise UserError(f"--init-from {options.init_from}: {start}; omit it, or start a new run")
    if options.keep_optimizer and not old.state_from:
        raise UserError(f"--keep-optimizer: {path} started with a new optimizer; omit it, or start a new run (--out)")
    wants_adapters = any(value for name, value in options.settings.items() if name.startswith("lora."))
    if wants_adapters and not old.lora.rank:
        new = f"jaxgpt train finetune --init-from {path} --lora.rank 8 --data.path PATH"
        raise UserError(f"{path} trains all weights, without adapters; to train adapters, start a new run: {new}")


def ignored_settings(file: Config, run: Config, given: Collection[str]) -> list[str]:
    """Return the names of the settings of a file that differ from a resumed run, which ignores the file's values.

    Settings that the data and the initial weights determine are omitted.

    Args:
        file: settings of the file.
        run: settings of the resumed run.
        given: names of the settings on the command line, which the run uses.
    """
    determined = {"model.vocab_size", "init_from", "state_from", "data.tokenizer"}  # given by the data and the weights
    if file.train.epochs:
        determined |= {"train.steps", "train.epochs"}
    return [name for name in changes(file, run) if name not in determined and name not in given]
