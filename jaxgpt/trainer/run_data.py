"""The data of a run: checked before weights are read, opened at a checkpoint, and the settings that depend on the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxgpt.checkpoint.data import compare_given, open_run_data
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config
from jaxgpt.data import Batches, Data
from jaxgpt.data.source_kinds import check_sources
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data_files import base_directory
from jaxgpt.errors import UserError
from jaxgpt.parallel.processes import same_on_all
from jaxgpt.progress import Progress
from jaxgpt.trainer.start import Start, new_run_command


def check_data(start: Start, config: Config, last: Info | None) -> None:
    """Check the data after the checkpoint `last`, before weights are read.

    Raises:
        UserError: if a path is missing, or a record is not a conversation, preference pair or prompt, as the objective needs.
    """
    if start.data is None:
        check_sources(config, last.tokens if last else 0)


def read_data(
    start: Start, config: Config, tokenizer: Tokenizer | None, last: Info | None, progress: Progress
) -> tuple[Config, Data]:
    """Open the data of a run after the checkpoint `last`; return the settings, with the new paths of moved data, and the data.

    Raises:
        UserError: if the data cannot be read or have changed since the checkpoint, or the data of the processes differ.
    """

    def facts(opened: tuple[Config, Data]) -> Mapping[str, object]:
        _, data = opened
        return data.facts()

    return same_on_all(lambda: _open_data(start, config, tokenizer, last, progress), facts)


def _open_data(
    start: Start, config: Config, tokenizer: Tokenizer | None, last: Info | None, progress: Progress
) -> tuple[Config, Data]:
    """Open the data in this process; see `read_data`."""
    run = start.resumed
    if start.data:
        config, data, change = compare_given(run, last, config, start.data)
    else:
        tokens = last.tokens if last else 0
        config, data, change = open_run_data(run, last, config, tokenizer, progress, tokens)
    if run and change:
        raise _changed_data(run, change)
    if start.data:
        return config, data
    return replace(config, directory=base_directory(config)), data


def _changed_data(run: Run, change: str) -> UserError:
    """Return the error for changed data of a run; `change`: description of the change since the checkpoint."""
    return UserError(
        f"{change}; restore it, add the new data as a source of --data.mix, or start a new run: {new_run_command(run)} "
        f"(with --keep-optimizer: from its optimizer state)"
    )


def with_data_facts(config: Config, data: Data, last: Info | None = None) -> Config:
    """Check the data; replace a vocabulary size of 0, and compute the total number of steps if `train.epochs` is set.

    The steps after the checkpoint `last` use the remaining windows of the epochs.

    Raises:
        UserError: if the data do not fit the settings, or `train.epochs` leaves no steps for an unfinished run.
    """
    config = config.with_model(vocab_size=config.model.vocab_size or data.tokenizer.vocab_size)
    train = config.train
    data.check(config)
    if not train.epochs:
        return config

    per_epoch = Batches.of(config, data.train).per_epoch
    windows = round(train.epochs * per_epoch, 6)  # 1.1 * 10 = 11.000000000000002
    if last is None:
        steps = math.ceil(windows / train.batch_size)
        return replace(config, train=replace(train, steps=max(steps, 1), epochs=0.0))

    old = last.config().train
    left = windows - last.tokens // config.row_tokens
    is_finished = last.step == old.steps and left > -old.batch_size  # the last batch may exceed the epochs
    if left <= 0 and not is_finished:
        passed = last.tokens / config.row_tokens / per_epoch
        raise UserError(
            f"train.epochs {train.epochs:g} does not exceed the {passed:.3g} epochs up to the current step {last.step}; "
            f"raise it, or omit it"
        )
    steps = last.step + max(math.ceil(left / train.batch_size), 0)
    return replace(config, train=replace(train, steps=steps, epochs=0.0))
