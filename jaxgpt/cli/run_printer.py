"""`RunPrinter` prints a training run: introduction, progress line, evaluations, sample and summary; it draws loss.png."""

from __future__ import annotations

import math
import shlex
import time
from contextlib import ExitStack
from typing import NamedTuple

from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.info import Info, read_info
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.console import Console, line_shown, note, progress
from jaxgpt.cli.draw import draw_run
from jaxgpt.cli.eval_results import ERROR_OF_DATA, ERROR_OF_PAIRS
from jaxgpt.cli.final_sample import FinalPrompt, check_prompt, final_prompt, final_sample
from jaxgpt.cli.introduction import introduction
from jaxgpt.cli.output import aligned
from jaxgpt.cli.progress_line import ProgressLine
from jaxgpt.cli.run_summary import run_summary, update_baselines
from jaxgpt.cli.train_settings import has_preset_prompt
from jaxgpt.config import Config
from jaxgpt.data import Data
from jaxgpt.directories import LOSS_FIGURE, METRICS
from jaxgpt.early_end import set_advice
from jaxgpt.errors import UserError, plural
from jaxgpt.parallel.processes import is_leader
from jaxgpt.progress import Progress
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program

SHOWN = ("accuracy", "margin")  # metrics of an objective that are printed with its loss
PLOT_EVERY = 30.0  # minimum seconds between drawings of loss.png during a run; each takes 0.1 s
BELOW_FACTS = " " * len("devices  ")  # indent of a line below the facts of `introduction`
BELOW_STEP = " " * len("step     1: ")  # indent of a line below the line of an evaluation


class StartedRun(NamedTuple):
    """The arguments of `Listener.started`, except `step`."""

    program: Program
    data: Data
    run: Run


class RunPrinter(Listener):
    """Print the progress and the results of a run, in process 0; use as a context manager.

    Attributes:
        resume_options: options to add to the resume command, because the run does not record them.
    """

    def __init__(self) -> None:
        self.resume_options: list[str] = []
        self._started: StartedRun | None = None  # None before `started`
        self._console = Console(quiet=not is_leader())
        self._line = ProgressLine()
        self._shown_line = ExitStack()  # closing it removes the progress line
        self._drawn = time.monotonic()  # time of the last drawing; at first, the start

    def __enter__(self) -> RunPrinter:
        self._shown_line.enter_context(line_shown(lambda: str(self._line), self._console))
        return self

    def __exit__(self, *error: object) -> None:
        self._shown_line.close()

    @property
    def has_steps(self) -> bool:
        """Whether this process has taken a step."""
        return bool(self._line.metrics)

    @property
    def started_run(self) -> StartedRun:
        """The run; available after `started`."""
        assert self._started is not None, "the run has not started"
        return self._started

    @property
    def resume_command(self) -> str:
        """The command that resumes the run; available after `started`."""
        out = str(self.started_run.run.path)
        return shlex.join(["jaxgpt", "train", "--resume", "--out", out, *self.resume_options])

    def opened(self, program: Program, data: Data, step: int) -> None:
        """Reject a final prompt that cannot be encoded; for a resumed run or a preset's prompt, only print a note."""
        config = program.config
        try:
            check_prompt(config, data.tokenizer)
        except UserError as e:
            if step == 0 and not has_preset_prompt(config):
                raise
            self.note(f"no sample at the end: {e}")

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self._started = StartedRun(program, data, run)
        config = program.config
        self._line.step = step
        self._line.total = config.train.steps
        set_advice(lambda: f"{kept_checkpoint_message(run.checkpoints)}; resume with: {self.resume_command}")
        last = read_info(run.checkpoints / str(step)) if step else Info(0)
        self._console.write(aligned(introduction(program, data, run, last)))
        if is_leader():
            update_baselines(run, data, config.post.objective)

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        stage = self._line.stage
        if stage is None or stage.name != name:
            stage = Progress(name) if name else None
            self._line.stage = stage
        if stage:
            stage(done, total)

    def compiled(self, seconds: float) -> None:
        self._console.write(f"{BELOW_FACTS}compiled in {seconds:.1f} s")

    def progress(self, metrics: dict[str, float]) -> None:
        self._line.step = int(metrics["step"]) + 1
        self._line.metrics = metrics

    def evaluated(self, step: int, result: Result) -> None:
        if isinstance(result, Evaluation):
            program, data, _ = self.started_run
            for line in evaluation_lines(step, result, program.config, data):
                self._console.write(line)
        elif result.metrics:
            self._console.write(f"step {step:>5}: {result}")
        if time.monotonic() - self._drawn > PLOT_EVERY:
            self._draw()

    def note(self, text: str) -> None:
        if is_leader():
            note(text)

    def finished(self, outcome: Outcome) -> None:
        """Print a sample, the run directory and the next command, or the command that resumes a stopped run."""
        self._draw()
        self._shown_line.close()
        if outcome.stopped:
            self.note(f"stopped and saved at step {outcome.step}; resume with: {self.resume_command}")
            return
        program, data, run = self.started_run
        train = program.config.train
        if outcome.step < train.steps:
            without = f"{train.patience} evaluations without an improvement (--train.patience)"
            self.note(f"stopped early at step {outcome.step}: {without}")

        prompt = self._prompt()
        if prompt is not None and train.sample_tokens:
            self._print_sample(outcome, prompt)  # in all processes: each may hold only part of the weights
        if is_leader():
            summary = run_summary(run, data, "" if prompt is None else prompt.text)
            self._console.write(aligned(summary))

    def failed(self, error: BaseException) -> None:
        self._draw()

    def _prompt(self) -> FinalPrompt | None:
        """Return the prompt of the sample and of the next command; None: the prompt cannot be encoded."""
        program, data, _ = self.started_run
        config = program.config
        try:
            return final_prompt(config, data.tokenizer, data.val, data.bos_ids)
        except UserError as e:
            if config.train.sample_tokens:
                self.note(f"cannot sample: {e}")
            return None

    def _print_sample(self, outcome: Outcome, prompt: FinalPrompt) -> None:
        """Print a sample and the answer in the data, if any; print a note if sampling fails."""
        program, data, _ = self.started_run
        try:
            params = program.weights(outcome.state.eval_params)
            with progress("compiling the sampler, and sampling"):
                text = final_sample(program, data.tokenizer, params, prompt)
        except UserError as e:  # for example, out of memory, which must not fail a complete run
            self.note(f"cannot sample: {e}")
            return
        end = f"--- the data continue with {prompt.answer!r} ---" if prompt.answer else "---"
        self._console.write(f"\n--- a sample, after {prompt.text!r} ---\n{text}\n{end}\n")

    def draw_interrupted(self, run: Run, config: Config) -> None:
        """Draw loss.png of a finished run if a kill interrupted its last drawing: the file is older than the metrics."""
        if not is_leader():
            return
        plot = run.path / LOSS_FIGURE
        metrics = run.path / METRICS
        is_current = plot.is_file() and metrics.is_file() and plot.stat().st_mtime >= metrics.stat().st_mtime
        if not is_current:
            self._draw_run(run, config)

    def _draw(self) -> None:
        """Draw loss.png in process 0, if a step was taken; print a note if drawing fails.

        Missing losses and damaged baselines have no note.
        """
        # Without steps, the directory may hold an old run, restored after an error.
        if not (is_leader() and self.has_steps):
            return
        program, _, run = self.started_run
        self._draw_run(run, program.config)
        self._drawn = time.monotonic()

    def _draw_run(self, run: Run, config: Config) -> None:
        try:
            draw_run(run, f"{config.preset}: {run.path}")
        except UserError:  # no losses yet, or damaged baselines.json
            pass
        except Exception as e:  # for example, a full disk, which must not fail the run
            self.note(f"cannot draw {run.path / LOSS_FIGURE}: {e}")


def evaluation_lines(step: int, result: Evaluation, config: Config, data: Data) -> list[str]:
    """Format the evaluation of a loss; after the last step, also explain its error."""
    has_pairs = config.post.is_preference
    kind = "validation"
    if not data.held_out:
        kind = "training pairs" if has_pairs else "training text"
    counted = plural(result.tokens, "pair") if has_pairs else f"{result.tokens:,} tokens"
    others = "".join(f", {name} {value:.4g}" for name, value in result.others.items() if name in SHOWN)
    lines = [f"step {step:>5}: {kind} loss {result}{others} ({counted})"]
    if step == config.train.steps and math.isfinite(result.stderr):
        lines.append(f"{BELOW_STEP}{ERROR_OF_PAIRS if has_pairs else ERROR_OF_DATA}")
    return lines
