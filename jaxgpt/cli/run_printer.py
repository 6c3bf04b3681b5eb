"""`RunPrinter` prints a training run: introduction, progress line, evaluations, sample and summary; it draws loss.png."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.info import Info, read_info
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.console import Console, line_shown, note, progress
from jaxgpt.cli.draw import draw_run
from jaxgpt.cli.eval_results import ERROR_OF_DATA, ERROR_OF_PAIRS
from jaxgpt.cli.final_sample import FinalPrompt, check_prompt, final_prompt, final_sample
from jaxgpt.cli.introduction import introduction
from jaxgpt.cli.output import aligned
from jaxgpt.cli.run_summary import run_summary, update_baselines
from jaxgpt.cli.train_settings import has_preset_prompt
from jaxgpt.data import Data
from jaxgpt.early_end import set_advice
from jaxgpt.errors import UserError, plural
from jaxgpt.parallel.processes import is_leader
from jaxgpt.progress import Progress, duration
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program

SHOWN = ("accuracy", "margin")  # metrics of an objective that are printed with its loss
PLOT_EVERY = 30.0  # minimum seconds between drawings of loss.png during a run; each takes 0.1 s


class RunPrinter(Listener):
    """Print the progress and the results of a run, in process 0; use as a context manager.

    Attributes:
        resume_options: options to add to the resume command, because the run does not record them.
    """

    # Set by `started`.
    program: Program
    data: Data
    run: Run

    def __init__(self) -> None:
        self.resume_options: list[str] = []
        self.console = Console(quiet=not is_leader())
        self._step = 0
        self._total = 0
        self._metrics: dict[str, float] = {}
        self._stage: Progress | None = Progress("starting")
        self._drawn = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> RunPrinter:
        self._stack.enter_context(line_shown(self._line, self.console))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

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
        self.program = program
        self.data = data
        self.run = run
        config = program.config
        self._step = step
        self._total = config.train.steps
        set_advice(lambda: f"{kept_checkpoint_message(run.checkpoints)}; resume with: {self.resume_command}")
        last = read_info(run.checkpoints / str(step)) if step else Info(0)
        self.console.write(aligned(introduction(program, data, run, last)))
        if is_leader():
            update_baselines(run, data, config.post.objective)
            self._stack.callback(self._draw)  # at the end of the run, even after a stop or failure

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        if self._stage is None or self._stage.name != name:
            self._stage = Progress(name) if name else None
        if self._stage:
            self._stage(done, total)

    def compiled(self, seconds: float) -> None:
        self.console.write(f"         compiled in {seconds:.1f} s")

    def progress(self, metrics: dict[str, float]) -> None:
        self._step = int(metrics["step"]) + 1
        self._metrics = metrics

    def evaluated(self, step: int, result: Result) -> None:
        if isinstance(result, Evaluation):
            for line in evaluation_lines(step, result, self.program, self.data):
                self.console.write(line)
        elif result.metrics:
            self.console.write(f"step {step:>5}: {result}")
        if is_leader() and time.monotonic() - self._drawn > PLOT_EVERY:
            self._draw()

    def note(self, text: str) -> None:
        if is_leader():
            note(text)

    @property
    def has_steps(self) -> bool:
        """Whether this process has taken a step."""
        return bool(self._metrics)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return shlex.join(["jaxgpt", "train", "--resume", "--out", str(self.run.path), *self.resume_options])

    def finished(self, outcome: Outcome) -> None:
        """Print a sample, the run directory and the next command, or the command that resumes a stopped run."""
        self._stack.close()  # removes the progress line, and draws loss.png
        if outcome.stopped:
            self.note(f"stopped and saved at step {outcome.step}; resume with: {self.resume_command}")
            return
        train = self.program.config.train
        if outcome.step < train.steps:
            without = f"{train.patience} evaluations without an improvement (--train.patience)"
            self.note(f"stopped early at step {outcome.step}: {without}")

        prompt = self._prompt()
        if prompt is not None and train.sample_tokens:
            self._print_sample(outcome, prompt)  # in all processes: each may hold only part of the weights
        if is_leader():
            summary = run_summary(self.run, self.data, "" if prompt is None else prompt.text)
            self.console.write(aligned(summary))

    def _prompt(self) -> FinalPrompt | None:
        """Return the prompt of the sample and of the next command; None: the prompt cannot be encoded."""
        config = self.program.config
        try:
            return final_prompt(config, self.data.tokenizer, self.data.val, self.data.bos_ids)
        except UserError as e:
            if config.train.sample_tokens:
                self.note(f"cannot sample: {e}")
            return None

    def _print_sample(self, outcome: Outcome, prompt: FinalPrompt) -> None:
        """Print a sample and the answer in the data, if any; print a note if sampling fails."""
        try:
            params = self.program.weights(outcome.state.eval_params)
            with progress("compiling the sampler, and sampling"):
                text = final_sample(self.program, self.data.tokenizer, params, prompt)
        except UserError as e:  # for example, out of memory, which must not fail a complete run
            self.note(f"cannot sample: {e}")
            return
        end = f"--- the data continue with {prompt.answer!r} ---" if prompt.answer else "---"
        self.console.write(f"\n--- a sample, after {prompt.text!r} ---\n{text}\n{end}\n")

    def _line(self) -> str:
        """Return the progress line; called by the thread that shows it."""
        return progress_line(self._step, self._total, self._metrics, self._stage)

    def _draw(self) -> None:
        """Draw loss.png, if a step was taken; print a note if drawing fails."""
        if not self.has_steps:  # the directory may hold the old run, restored after an error
            return
        try:
            with suppress(UserError):  # no losses yet, or damaged baselines.json
                draw_run(self.run, f"{self.program.config.preset}: {self.run.path}")
        except Exception as e:
            self.note(f"cannot draw {self.run.path / 'loss.png'}: {e}")
        self._drawn = time.monotonic()


def progress_line(step: int, total: int, metrics: Mapping[str, float], stage: Progress | None) -> str:
    """Format step, loss, accuracy or reward, then the stage or, while steps are taken, learning rate, MFU, speed and time left.

    Args:
        step: number of steps taken.
        total: number of steps of the run; 0: not known yet.
        metrics: metrics of the last step, as for `Listener.progress`; {}: no step was taken.
        stage: stage between steps, such as an evaluation; None: steps are taken.
    """
    parts = [f"step {step:>5}/{total}"] if total else []
    if metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    for name in ("accuracy", "reward"):
        if name in metrics:
            parts.append(f"{name} {metrics[name]:.2f}")
    if stage:
        return "  ".join([*parts, str(stage)])

    if "lr" in metrics:
        parts.append(f"lr {metrics['lr']:.2e}")
    if "mfu" in metrics:
        parts.append(f"mfu {metrics['mfu']:.0%}")
    if "tokens_per_second" in metrics:
        parts += [f"{metrics['tokens_per_second']:,.0f} tok/s", f"{duration(metrics['seconds_left'])} left"]
    return "  ".join(parts)


def evaluation_lines(step: int, result: Evaluation, program: Program, data: Data) -> list[str]:
    """Format the evaluation of a loss; after the last step, also explain its error."""
    config = program.config
    has_pairs = config.post.is_preference
    kind = "validation"
    if not data.held_out:
        kind = "training pairs" if has_pairs else "training text"
    counted = plural(result.tokens, "pair") if has_pairs else f"{result.tokens:,} tokens"
    others = "".join(f", {name} {value:.4g}" for name, value in result.others.items() if name in SHOWN)
    lines = [f"step {step:>5}: {kind} loss {result}{others} ({counted})"]
    if step == config.train.steps and math.isfinite(result.stderr):
        lines.append(f"            {ERROR_OF_PAIRS if has_pairs else ERROR_OF_DATA}")
    return lines
