"""Start or resume a run: its settings, weights and directory before the first step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.data import compare_given, open_run_data
from jaxgpt.checkpoint.index import checkpoints, latest_valid, saved_steps
from jaxgpt.checkpoint.info import SEAL, Info, read_info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run, check_free, delete_replaced, new_run, open_run, replaced_note, replaced_run
from jaxgpt.checkpoint.source import (
    Place,
    WeightSource,
    as_path,
    check_base,
    checksum,
    first_difference,
    needed_runs,
    open_base,
    open_base_of,
    open_source,
)
from jaxgpt.config import Config, changes, flat
from jaxgpt.data import Batches, Data
from jaxgpt.data.bos import with_bos
from jaxgpt.data.source_settings import base_directory, check_sources
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.directories import NEW
from jaxgpt.errors import UserError, short_repr
from jaxgpt.locks import sole_writer
from jaxgpt.model.params import abstract_params
from jaxgpt.parallel.processes import on_leader, same_on_all
from jaxgpt.progress import Progress
from jaxgpt.provenance import versions
from jaxgpt.train.loss import FrozenParts, base_of
from jaxgpt.trainer.evaluation import Evaluator
from jaxgpt.trainer.feed import DataFeed, Feed
from jaxgpt.trainer.given import check_given, name_of, ranking_of
from jaxgpt.trainer.phases import changed_data, changed_sources, new_run_command
from jaxgpt.trainer.program import Program, build
from jaxgpt.trainer.resume import check_resume


class Start(NamedTuple):
    """Training job: a new run in `out`, or the continuation of `run`.

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
        feed: function `(program, data, last checkpoint or None) -> Feed` that returns the batches of the run. With a true
            attribute `of_settings`, it follows from the settings, and checkpoints do not name it.
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


@dataclass
class Base:
    """Frozen weights: a function that reads them onto the devices of a program, and records their checksum.

    Attributes:
        source: the weights.
        run: run that needs these weights, to resume or, with adapters, to start from; None: a new run.
        part: as for `check_base`.
        checksum: SHA-256 of the weights, after the call.
    """

    source: WeightSource
    run: Run | None
    part: str = "base"
    checksum: str = ""

    def __call__(self, place: Place) -> Any:
        """Read the weights; raise `UserError` if the run was trained with different weights."""
        base = self.source.read_frozen(place)
        if self.run:
            check_base(self.run, self.source, base, self.part)
        self.checksum = base.checksum
        return base.params


class InitialWeights(NamedTuple):
    """Sources of the initial weights and of the frozen arrays, and the tokenizer.

    Attributes:
        initial: source of the initial weights; None: random initialization, or the run's checkpoint.
        frozen: base of the adapters (None: random weights), `Start.frozen`, or `FrozenParts` of both, with unstacked layers; a
            `Base` is not yet read.
        checksum: SHA-256 of the arrays of `Start.frozen`; "": no arrays.
        tokenizer: tokenizer of the weights or of the resumed run; None: the tokenizer of the data.
        state: checkpoint of the initial weights and optimizer state (`state_from`); None: a new optimizer.
    """

    initial: WeightSource | None = None
    frozen: Base | Any = ()
    checksum: str = ""
    tokenizer: Tokenizer | None = None
    state: Path | None = None

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes."""
        facts = {"the frozen weights": self.checksum} if self.checksum else {}
        for part, each in self.parts.items():
            if isinstance(each, Base):
                name = "the reference" if part == "frozen" else "the frozen weights"
                facts[name] = each.source.digest
        if self.initial:
            facts["the weights of --init-from"] = self.initial.digest
        if self.state:
            facts["the optimizer state of --init-from"] = read_info(self.state).sha256[SEAL]
        return facts

    def about(self) -> dict[str, Any]:
        """Return the facts that every checkpoint records, and a resumed run must match, after the weights are read."""
        *_, last = self.parts
        checksums = {last: self.checksum}
        for part, each in self.parts.items():
            if isinstance(each, Base):
                checksums[part] = each.checksum
        return {part: checksum for part, checksum in checksums.items() if checksum}

    @property
    def parts(self) -> dict[str, Any]:
        """The frozen arrays by the name of their checksum in checkpoints; `Start.frozen` is the last."""
        if isinstance(self.frozen, FrozenParts):
            return {"base": self.frozen.base, "frozen": self.frozen.of_objective}
        return {"base": self.frozen}


def check(start: Start) -> None:
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
    open_run(run.path)
    with sole_writer(run.path):
        pass
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


def open_weights(start: Start) -> InitialWeights:
    """Open the initial weights (`init_from`) or the base of adapters without reading them, and read their tokenizer.

    Raises:
        UserError: if the weights are missing or damaged, or the optimizer state needs the base of its adapters.
    """
    config = start.config
    run = start.resumed
    is_first = run is None or not checkpoints(run.checkpoints)

    # The optimizer state of an earlier run, with its weights.
    origin = None
    state = None
    if config.state_from and is_first:
        state = _existing_state(config.state_from)
        path, _ = parse_checkpoint(config.state_from)
        origin = Run(path)

    if config.lora.rank:
        weights = _open_adapters(start, run or origin, state)
    else:
        weights = _open_frozen_arrays(start)._replace(state=state)
        if config.init_from and is_first and state is None:
            initial = open_source(*parse_checkpoint(config.init_from))
            weights = weights._replace(initial=initial)

    # The tokenizer of the resumed run, or of the run with the initial weights.
    tokenizer = None
    source = origin or _run_of_weights(start, weights)
    if run:
        tokenizer = run.tokenizer()
    elif source:
        tokenizer = with_bos(source.tokenizer(), config.data.bos)
    return weights._replace(tokenizer=tokenizer)


def _open_adapters(start: Start, owner: Run | None, state: Path | None) -> InitialWeights:
    """Open the base of adapters.

    Args:
        start: the training job.
        owner: run that was trained with this base, to resume or to start from; None: a new run.
        state: checkpoint of the initial adapters and optimizer state.
    """
    config = start.config
    if state and not config.init_from:
        raise UserError(
            f"with lora.rank, state_from {config.state_from} needs the base of its adapters: set init_from to the init_from of "
            f"that run"
        )

    base = None
    if config.init_from:
        run = start.resumed
        source = open_base(run, config) if run else open_base_of(config.init_from, config.model)
        base = Base(source, owner)

    # The objective receives the given arrays, otherwise the base.
    weights = _open_frozen_arrays(start, part="frozen")
    has_own = isinstance(weights.frozen, Base) or bool(weights.checksum)
    frozen = FrozenParts(base, weights.frozen) if has_own else base
    return weights._replace(frozen=frozen, state=state)


def _open_frozen_arrays(start: Start, part: str = "base") -> InitialWeights:
    """Open the frozen weights of an objective, or compute the checksum of its frozen arrays; `part` as for `check_base`."""
    frozen = start.frozen
    if isinstance(frozen, str):
        source = open_frozen(frozen, start.config)
        return InitialWeights(frozen=Base(source, start.resumed, part))
    if isinstance(frozen, WeightSource):
        return InitialWeights(frozen=Base(frozen, start.resumed, part))
    if jax.tree.leaves(frozen):
        return InitialWeights(frozen=frozen, checksum=checksum(frozen))
    return InitialWeights(frozen=frozen)


def _run_of_weights(start: Start, weights: InitialWeights) -> Run | None:
    """Return the run with the tokenizer for a new run; None: the tokenizer comes from the data."""
    if weights.initial:
        return weights.initial.run
    base = base_of(weights.frozen)
    if start.config.lora.rank and isinstance(base, Base):
        return base.source.run
    if isinstance(start.frozen, WeightSource):  # random weights have the tokenizer of the frozen weights
        return start.frozen.run
    return None


def _existing_state(checkpoint: str) -> Path:
    """Return the path of a checkpoint to start from; raise `UserError` if it has been deleted."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise UserError(
            f"the checkpoint to start from, {checkpoint}, has been deleted: restore it, or start from a different one with "
            f"--init-from RUN --keep-optimizer --overwrite"
        )
    return path


def open_frozen(path: str, config: Config) -> WeightSource:
    """Open the frozen weights at a path; raise `UserError` if their model has different weights than the trained model."""
    source = open_source(*parse_checkpoint(path))
    difference = first_difference(abstract_params(source.config.model), config.model)
    if difference:
        raise UserError(
            f"the model of {path} differs from the trained model ({difference}): choose weights of the same model"
        )
    return source


def newest(start: Start, note: Callable[[str], None]) -> Info | None:
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


def completed(config: Config, data: Data, last: Info | None = None) -> Config:
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
