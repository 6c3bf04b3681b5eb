"""`Start`, the training job, and checks of its directory before slow work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import FrozenPart
from jaxgpt.checkpoint.needed import needed_runs
from jaxgpt.checkpoint.new_path import check_free
from jaxgpt.checkpoint.paths import as_path, parse_checkpoint
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.checkpoint.source import WeightSource
from jaxgpt.config import Config, flat
from jaxgpt.data import Data
from jaxgpt.errors import UserError
from jaxgpt.locks import sole_writer
from jaxgpt.provenance import versions
from jaxgpt.trainer.build import build
from jaxgpt.trainer.evaluators import Evaluator
from jaxgpt.trainer.feed import DataFeed, FeedOfSettings, MakeFeed
from jaxgpt.trainer.given import RunParts, name_of, ranking_of
from jaxgpt.trainer.program import Program


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
        feed: function `(program, data, last checkpoint or None) -> Feed` that returns the batches of the run. Checkpoints
            record the name of a feed that the settings do not determine (`FeedOfSettings`).
        evaluators: evaluators of the parameters; the first ranks the checkpoints. Empty: the loss on `data.val`.
    """

    config: Config
    out: str = ""
    overwrite: bool = False
    run: Run | str | Path | None = None
    data: Data | None = None
    build: Callable[..., Program] = build
    frozen: str | WeightSource | Any = ()
    feed: MakeFeed = DataFeed
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

    def parts(self, program: Program, checksums: Mapping[FrozenPart, str]) -> RunParts:
        """Return the parts that a resumed run must receive again; `checksums` as in `RunParts`."""
        given = dict(program.given)
        config = program.config
        if jax.tree.leaves(self.frozen) and not config.post.has_reference:
            given["frozen"] = ""
        is_of_settings = config.post.is_rollout or isinstance(self.feed, FeedOfSettings)
        if self.feed is not DataFeed and not is_of_settings:
            given["feed"] = name_of(self.feed)
        if self.evaluators:
            first, *_ = self.evaluators
            ranking = ranking_of(first, config)
            if ranking:
                given["evaluators"] = ranking
        return RunParts(given, bool(self.evaluators), checksums)


def check_directory(start: Start) -> None:
    """Check the directory of the run before data and weights are read.

    Raises:
        UserError: if `out` holds a run (unless `overwrite`), parts of a run, or the initial or frozen weights; or if the run
            to resume is incomplete or locked, or has no optimizer state.
    """
    run = start.resumed
    if run:
        _check_resumable(run)
    else:
        _check_out(start)


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
    """Check that a new run can be created, and that creating it does not delete its initial or frozen weights."""
    if not start.out:
        return  # the run gets a new directory
    out = Path(start.out)
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


def new_run_command(run: Run) -> str:
    """Return the command that trains the weights of a run on different data, in a new run."""
    return f"jaxgpt train finetune --init-from {run.path} --data.path PATH"
