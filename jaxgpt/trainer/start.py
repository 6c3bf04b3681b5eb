"""Start or resume a run: its settings, data and directory before the first step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.data import compare_given, open_run_data
from jaxgpt.checkpoint.index import checkpoints, latest_valid, saved_steps
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.match import name_difference
from jaxgpt.checkpoint.new_run import check_free, new_run
from jaxgpt.checkpoint.paths import as_path, parse_checkpoint
from jaxgpt.checkpoint.replacement import delete_replaced, replaced_note, replaced_run
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.checkpoint.source import WeightSource, needed_runs
from jaxgpt.checkpoint.store import stored_weights
from jaxgpt.config import Config, changes, flat
from jaxgpt.data import Batches, Data
from jaxgpt.data.source_settings import base_directory, check_sources
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.directories import NEW
from jaxgpt.errors import UserError, short_repr
from jaxgpt.locks import sole_writer
from jaxgpt.parallel.processes import on_leader, same_on_all
from jaxgpt.progress import Progress
from jaxgpt.provenance import versions
from jaxgpt.trainer.build import build
from jaxgpt.trainer.evaluators import Evaluator
from jaxgpt.trainer.feed import DataFeed, Feed
from jaxgpt.trainer.given import check_given, name_of, ranking_of
from jaxgpt.trainer.phases import changed_data, changed_sources, new_run_command
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.resume import check_resume


class Start(NamedTuple):
    """A training job: a new run in `out`, or the continuation of `run`.

    Attributes:
        config: settings of the run.
        out: directory of a new run; empty: the first unused name of runs/PRESET, runs/PRESET-2, ...
        overwrite: replace the run in `out`, which is kept until the first step of the new run.
        run: the run to resume, or its path; None: a new run.
        data: training and validation data; None: `open_data(config)`.
        build: function that returns the program; `partial(build, optimizer=..., objective=...)` replaces parts of it.
        frozen: argument of the objective, any tree of arrays that are read, but not trained, such as a reference model; a
            resumed run needs the same arrays. A string is the path of a run or RUN/checkpoints/STEP with the same model, and a
            `WeightSource` has weights of any model, which are read onto the devices. With `lora.rank` and `()`, the objective
            receives the base of the adapters.
        feed: function `(program, data, last checkpoint or None) -> Feed` that returns the batches of the run. If its
            attribute `of_settings` is true, the settings determine the feed, and checkpoints do not record its name.
        evaluators: values that judge the parameters; the first ranks the checkpoints. Empty: the loss on `data.val`.
    """

    config: Config
    out: str = ""
    overwrite: bool = False
    run: Run | str | Path | None = None
    data: Data | None = None
    build: Callable[..., Program] = build
    frozen: str | WeightSource | Any = ()
    feed: Callable[[Program, Data, Info | None], Feed] = DataFeed
    evaluators: Sequence[Evaluator] = ()

    @property
    def resumed(self) -> Run | None:
        """The run to resume; None: a new run."""
        if self.run is None or isinstance(self.run, Run):
            return self.run
        return Run(as_path(self.run))

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes."""
        options = {"--out": self.out, "--overwrite": self.overwrite, "the run to resume": str(self.resumed)}
        return versions() | options | flat(self.config)

    def given(self, program: Program) -> dict[str, str]:
        """Return the names of the parts of the run that are given in Python, keyed by part."""
        given = dict(program.given)
        config = program.config
        if jax.tree.leaves(self.frozen) and not config.post.has_reference:
            given["frozen"] = ""
        is_of_settings = config.post.is_rollout or getattr(self.feed, "of_settings", False)
        if self.feed is not DataFeed and not is_of_settings:
            given["feed"] = name_of(self.feed)
        if self.evaluators:
            first, *_ = self.evaluators
            ranking = ranking_of(first, config)
            if ranking:
                given["evaluators"] = ranking
        return given


def check_directory(start: Start) -> None:
    """Check the directory of the run before data and weights are read.

    Raises:
        UserError: if `out` holds a run (unless `overwrite`) or the initial weights, or the run to resume is locked or has no
            optimizer state.
    """
    run = start.resumed
    if run:
        _check_resumable(run)
    else:
        _check_out(start)


def check_data(start: Start, config: Config, last: Info | None) -> None:
    """Check the data after the checkpoint `last`, before weights are read.

    Raises:
        UserError: if a path of the data is missing, or a record of conversations is unreadable.
    """
    if start.data is None:
        check_sources(config, last.tokens if last else 0)


def _check_resumable(run: Run) -> None:
    """Check that a run is complete, not locked, and has an optimizer state."""
    open_run(run.path)
    with sole_writer(run.path):
        pass  # an error if another process trains the run
    step = max(checkpoints(run.checkpoints), default=None)
    if step is not None and not (run.checkpoints / str(step) / "opt_state").is_dir():
        raise UserError(
            f"{run.path} has no optimizer state and cannot be resumed; train it in a new run: {new_run_command(run)}"
        )


def _check_out(start: Start) -> None:
    """Check that a new run can be created, and would not delete the weights that it starts from."""
    out = Path(start.out)
    if start.out:
        check_free(out, start.overwrite)
    if not start.overwrite:
        return

    config = start.config
    kept = set[Path]()
    for origin in (config.init_from, config.state_from, _frozen_path(start)):
        if origin:
            path, _ = parse_checkpoint(origin)
            kept |= needed_runs(Run(path))
    if out.resolve() in kept:
        raise UserError(f"--out {out} --overwrite would delete the weights to start from: choose a different --out")


def _frozen_path(start: Start) -> str:
    """Return the path of the frozen weights; "": arrays, or no frozen weights."""
    if isinstance(start.frozen, WeightSource):
        return start.frozen.path
    if isinstance(start.frozen, str):
        return start.frozen
    return ""


def newest_checkpoint(start: Start, note: Callable[[str], None]) -> Info | None:
    """Return the newest intact checkpoint of the run to resume; None: train from step 0.

    Process 0 renames newer, damaged checkpoints, and reports them with `note`.

    Raises:
        UserError: if the run is locked by another process, or all its checkpoints are damaged.
    """
    run = start.resumed
    if run is None:
        return None

    def on_disk() -> dict[str, Any] | None:
        with sole_writer(run.path):
            last = latest_valid(run.checkpoints, note)
        return asdict(last) if last else None

    last = on_leader(on_disk)
    return Info(**last) if last else None


def read_data(
    start: Start, config: Config, tokenizer: Tokenizer | None, last: Info | None, progress: Progress
) -> tuple[Config, Data]:
    """Open the data of a run after the checkpoint `last`; return the settings with the paths found, and the data.

    Raises:
        UserError: if the data cannot be read, a source of a mixture has changed since the checkpoint, or the data of the
            processes differ.
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
        raise changed_data(run, change)
    if start.data:
        return config, data
    return replace(config, directory=base_directory(config)), data


def with_data_facts(config: Config, data: Data, last: Info | None = None) -> Config:
    """Check the data; set the vocabulary size and, with `train.epochs`, the total number of steps.

    The steps after the checkpoint `last` use the remaining windows of the epochs.
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


@contextmanager
def open_for_training(
    start: Start, program: Program, data: Data, last: Info | None, about: Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[Run]:
    """Create the run, or open the run to resume at the checkpoint `last`; process 0 locks it for all processes.

    Raises:
        UserError: if a run cannot be created in `out`, is locked by another process, or cannot be resumed with these
            settings and data.
    """
    resumed = start.resumed
    with ExitStack() as lock:

        def on_disk() -> str:
            if resumed is None:
                run = lock.enter_context(new_run(start.out, program.config, data.tokenizer, start.overwrite))
                return str(run.path)
            lock.enter_context(sole_writer(resumed.path))
            _reopen(resumed, start, program, last, about, note)
            return str(resumed.path)

        path = on_leader(on_disk)
        yield same_on_all(lambda: open_run(Path(path)), lambda _: {})  # error if a process cannot read the directory


def _check_names(run: Run, last: Info, program: Program) -> None:
    """Check that a checkpoint of an older version has the model's weights; older versions recorded no subclass of GPT."""
    stored = stored_weights(run.checkpoints, last.step)
    difference = name_difference(stored, program.abstract.checkpoint.params, type(program.model))
    if difference:
        raise UserError(
            f"{run.path} {difference}: resume it in Python with the class that it was trained with, "
            f'Start(config, run="{run.path}", build=partial(build, model=...))'
        )


def _reopen(
    run: Run, start: Start, program: Program, last: Info | None, about: Mapping[str, Any], note: Callable[[str], None]
) -> None:
    """Check that a run can continue from the checkpoint `last`, and report the changed settings."""
    shutil.rmtree(run.path / NEW, ignore_errors=True)  # left by a process that was killed while it replaced the run
    if replaced_run(run.path):
        note(replaced_note(run.path))
    else:
        delete_replaced(run.path)
    if saved_steps(run.checkpoints)[-1:] != ([last.step] if last else []):
        raise UserError(f"another process has trained {run.path} meanwhile: run the command again")

    config = program.config
    old = last.config() if last else run.config()
    check_resume(old, config, last.step if last else 0)
    if last is None:
        note(f"{run.path} has no checkpoint yet: starting again from step 0/{config.train.steps}")
    else:
        ranking = check_given(run, last, about["given"], start.evaluators)
        if last.model is None:
            _check_names(run, last, program)
        if any(last.about.get(part, "") != about.get(part, "") for part in ("base", "frozen")):
            raise UserError(f"the frozen weights of {run.path} have changed since step {last.step}: restore them")
        note(f"resuming from {run.checkpoints / str(last.step)} at step {last.step}/{config.train.steps}")
        for change in (changed_sources(config.data, last), ranking):
            if change:
                note(change)
    changed = changes(old, config)
    if changed:
        settings = (f"{name} {short_repr(was)} -> {short_repr(now)}" for name, (was, now) in changed.items())
        note(f"changed settings: {', '.join(settings)}")
