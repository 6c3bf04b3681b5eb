"""Prints a training run: introduction, progress line, evaluations, plot, sample and summary."""

from __future__ import annotations

import math
import shlex
import time
from contextlib import ExitStack, suppress
from typing import Any

from jaxgpt.atomic import write_json
from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.info import Info, read_info
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.draw import draw_run
from jaxgpt.cli.final_sample import check_prompt, final_sample, first_prompt, sample_command, without_bos
from jaxgpt.cli.introduction import Introduction
from jaxgpt.cli.output import ERROR_OF_DATA, ERROR_OF_PAIRS, Console, aligned, line_shown, note, progress
from jaxgpt.cli.train_settings import has_preset_prompt
from jaxgpt.config import TrainConfig
from jaxgpt.data import Data, Packed, Preferences, PromptSplit
from jaxgpt.errors import UserError, plural
from jaxgpt.parallel.processes import is_leader
from jaxgpt.progress import Progress, duration
from jaxgpt.report.baselines import baselines, read_baselines
from jaxgpt.signals import set_advice
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program

SHOWN = ("accuracy", "margin")  # metrics of an objective that are printed with its loss
PLOT_EVERY = 30.0  # minimum seconds between drawings of loss.png during a run; each takes 0.1 s


class RunPrinter(Listener):
    """Print the progress and the results of a run, in process 0; use as a context manager.

    Attributes:
        options: options of the command that are not settings of the run, for the command that resumes it.
    """

    program: Program
    data: Data
    run: Run

    def __init__(self) -> None:
        self.options: list[str] = []
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
        """Reject a prompt of the final sample that cannot be encoded; only print a note if an old run or a preset has it."""
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
        self.console.write(aligned(Introduction(program, data, run, last).lines()))
        if is_leader():
            self._update_baselines()
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
            kind = "validation" if self.data.held_out else f"training {self._examples}"
            counted = plural(result.tokens, "pair") if self._has_pairs else f"{result.tokens:,} tokens"
            others = "".join(f", {name} {value:.4g}" for name, value in result.others.items() if name in SHOWN)
            self.console.write(f"step {step:>5}: {kind} loss {result}{others} ({counted})")
            if step == self._total and math.isfinite(result.stderr):
                self.console.write(f"            {ERROR_OF_PAIRS if self._has_pairs else ERROR_OF_DATA}")
        elif result.metrics:
            self.console.write(f"step {step:>5}: {result}")
        if is_leader() and time.monotonic() - self._drawn > PLOT_EVERY:
            self._draw()

    def note(self, text: str) -> None:
        if is_leader():
            note(text)

    @property
    def _has_pairs(self) -> bool:
        """Whether the run trains on preference pairs."""
        return self.program.config.post.is_preference

    @property
    def _examples(self) -> str:
        """Name of the examples in the data: pairs or text."""
        return "pairs" if self._has_pairs else "text"

    @property
    def has_steps(self) -> bool:
        """Whether this process has taken a step."""
        return bool(self._metrics)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return shlex.join(["jaxgpt", "train", "--resume", "--out", str(self.run.path), *self.options])

    def finished(self, outcome: Outcome) -> None:
        """Print a sample, the run directory and the next command, or the command that resumes a stopped run."""
        self._stack.close()  # the progress line
        train = self.program.config.train
        if outcome.stopped:
            self.note(f"stopped and saved at step {outcome.step}; resume with: {self.resume_command}")
            return
        if outcome.step < train.steps:
            without = f"no lower validation loss in {train.patience} evaluations (--train.patience)"
            self.note(f"stopped early at step {outcome.step}: {without}")

        params = None
        if train.sample_tokens:
            params = self.program.weights(outcome.state.eval_params)
        prompt = self._print_sample(params)  # in all processes: each may hold only part of the weights
        if is_leader():
            self.console.write(aligned(self._summary(prompt)))

    def _print_sample(self, params: Any) -> str:
        """Print a sample, unless `params` is None, and return its prompt."""
        prompt = ""
        try:
            ids = first_prompt(self.program.config, self.data.tokenizer, self.data.val, self.data.bos_ids)
            prompt = self.data.tokenizer.decode(without_bos(self.data.tokenizer, ids))
            if params is not None:
                with progress("compiling the sampler, and sampling"):
                    text = final_sample(self.program, self.data.tokenizer, params, ids)
                self.console.write(f"\n--- a sample, after {prompt!r} ---\n{text}\n{self._sample_end()}\n")
        except UserError as e:  # for example, out of memory, which must not fail a complete run
            self.note(f"cannot sample: {e}")
        return prompt

    def _sample_end(self) -> str:
        """Return the line after the sample; for conversations and pairs, it contains the answer in the data."""
        val = self.data.val
        if self.program.config.train.prompt != TrainConfig.prompt or not isinstance(
            val, Packed | Preferences | PromptSplit
        ):
            return "---"
        answer = self.data.tokenizer.decode(val.answer())
        return f"--- the data continue with {answer!r} ---" if answer else "---"

    def _summary(self, prompt: str) -> dict[str, str]:
        """Return the baselines, the run directory and the next command, keyed by label."""
        path = self.run.path
        losses = ", ".join(f"{name} {loss:.2f}" for name, loss in self._baselines().items())
        has_answers = self.data.is_conversations or self.data.is_preferences or self.data.is_prompts
        can_chat = has_answers and self.data.tokenizer.special.chat_template is not None
        return {
            "baseline": f"{losses} (nats per token)" if losses else "",
            "run": f"{path} (loss.png, metrics.jsonl, checkpoints)",
            "next": shlex.join(["jaxgpt", "chat", str(path)]) if can_chat else sample_command(path, prompt),
        }

    def _update_baselines(self) -> None:
        """Write baselines.json, unless it describes the same data; a resumed run may have a different mixture."""
        with suppress(UserError):
            recorded = read_baselines(self.run.path)
            if recorded["losses"] and recorded.get("data") == self.data.fingerprint:
                return

        path = self.run.path / "baselines.json"
        found = baselines(self.data) if self.program.config.post.objective == "next-token" else None
        if found:
            write_json(path, found)
        else:
            path.unlink(missing_ok=True)

    def _baselines(self) -> dict[str, float]:
        """Return the baselines of the run; {} if baselines.json is missing or damaged."""
        with suppress(UserError):
            return dict(read_baselines(self.run.path)["losses"])
        return {}

    def _line(self) -> str:
        """Return the progress line: step, loss, then the activity, or learning rate, MFU, speed and time left."""
        metrics = self._metrics
        parts = [f"step {self._step:>5}/{self._total}"] if self._total else []
        if metrics:
            parts.append(f"loss {metrics['loss']:.4f}")
        for name in ("accuracy", "reward"):
            if name in metrics:
                parts.append(f"{name} {metrics[name]:.2f}")

        stage = self._stage  # read once: the main thread replaces it
        if stage:
            return "  ".join([*parts, str(stage)])

        if "lr" in metrics:
            parts.append(f"lr {metrics['lr']:.2e}")
        if "mfu" in metrics:
            parts.append(f"mfu {metrics['mfu']:.0%}")
        if "tokens_per_second" in metrics:
            parts += [f"{metrics['tokens_per_second']:,.0f} tok/s", f"{duration(metrics['seconds_left'])} left"]
        return "  ".join(parts)

    def _draw(self) -> None:
        """Draw loss.png, if a step was taken; print a note if drawing fails."""
        if not self.has_steps:  # the old run may have been restored
            return
        try:
            with suppress(UserError):  # no losses yet, or damaged baselines.json
                draw_run(self.run, f"{self.program.config.preset}: {self.run.path}")
        except Exception as e:
            self.note(f"cannot draw {self.run.path / 'loss.png'}: {e}")
        self._drawn = time.monotonic()
