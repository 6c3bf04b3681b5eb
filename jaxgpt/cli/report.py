"""Output of `jaxgpt train`: a live line on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.background import Baselines, LossPlot, read_baselines
from jaxgpt.cli.console import Console
from jaxgpt.cli.parse import command_line, note, path_word
from jaxgpt.cli.progress import EVERY, Activity, duration, progress
from jaxgpt.config import Config, TrainConfig, UserError
from jaxgpt.data import Data, Packed, Split, Tokenizer
from jaxgpt.lm import LM, generate
from jaxgpt.model.scan import unstack_layers
from jaxgpt.parallel.processes import collected, count, leader
from jaxgpt.prompts import beginning
from jaxgpt.trainer.evaluation import Evaluation, eval_params
from jaxgpt.trainer.loop import Outcome, Reporter
from jaxgpt.trainer.metrics import parameter_count
from jaxgpt.trainer.program import Program

TYPED = 24  # characters of a prompt
PLAIN_EVERY = 5.0  # seconds between lines if standard output is not a terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        super().on_broken_pipe()
        note("standard output was closed: training continues without it (Ctrl-C stops and saves)")


class Report(Reporter):
    """Print the progress and the results of a run."""

    def __init__(self, program: Program, data: Data, run: Run, step: int = 0) -> None:
        """
        Args:
            program: compiled functions of the run.
            data: training and validation data.
            run: the run directory.
            step: step at which training starts or resumes, for the progress bar.
        """
        self.program, self.data, self.run = program, data, run
        self._prompt = first_prompt(
            program.layout.config, data.tokenizer, data.val
        )  # before training, so that a bad prompt is reported early
        self.console = _Console(quiet=not leader())
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and leader()
        self._spoke = 0.0
        self._step, self._total, self._metrics = step, program.layout.config.train.steps, dict[str, float]()
        self._stage: Activity | None = Activity("starting")
        self._spinner = Spinner("dots")
        self._bar = Live(get_renderable=self._line, console=self.console, transient=True, refresh_per_second=4)
        self._ended = threading.Event()
        title = f"{program.layout.config.preset}: {run.path}"
        self._plot = LossPlot(run, title, lambda e: self.note(f"cannot draw {run.plot}: {e}"))
        self._baselines = Baselines(data, run.baselines, lambda e: self.note(f"cannot write {run.baselines}: {e}"))

    def __enter__(self) -> Report:
        self._introduce()
        if self.live:
            self._bar.start()
        elif leader():
            threading.Thread(target=self._tell_stages, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if leader() and (kind is None or issubclass(kind, Exception)):
                if kind is None:  # a run killed after its last step may have none
                    self._baselines.start()
                self._baselines.close()
                self._plot.close()
        finally:
            self._ended.set()
            if self.live:
                self._bar.stop()

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        stage = self._stage
        if stage is None or stage.name != name:
            stage = Activity(name) if name else None
        if stage is not None:
            stage(done, total)
        self._stage = stage

    def compiled(self, seconds: float) -> None:
        self._print(f"         compiled in {seconds:.1f} s")
        if leader():
            self._baselines.start()

    def progress(self, metrics: dict[str, float]) -> None:
        self._step, self._metrics = int(metrics["step"]) + 1, metrics
        if not self.live and time.monotonic() - self._spoke > PLAIN_EVERY:
            self._spoke = time.monotonic()
            self._print("  ".join(self._texts()))

    def evaluated(self, step: int, result: Evaluation) -> None:
        kind = "validation" if self.data.held_out else "training text"
        self._print(f"step {step:>5}: {kind} loss {result} ({result.tokens:,} tokens)")
        if leader():
            self._plot.update()

    def note(self, text: str) -> None:
        if leader():
            note(text)

    def finished(self, outcome: Outcome) -> None:
        """Print a sample, the run directory and the next command."""
        config = self.program.layout.config
        prompt, ids = self._prompt
        params = eval_params(outcome.state, config) if config.train.sample_tokens else None
        params = collected(params if params is None else self.program.weights(params))
        if not leader():
            return
        if params is not None:
            try:
                with progress("sampling"):
                    text = self._sample(params, prompt, ids)
                self._print(f"\n--- a sample, after {prompt!r} ---\n{prompt}{text}\n---\n")
            except UserError as e:  # such as too little memory for train.sample_tokens; the run itself is complete
                self.note(f"cannot sample: {e}")
        if losses := read_baselines(self.run.baselines):
            self._print(f"baseline {', '.join(f'{name} {loss:.2f}' for name, loss in losses.items())} (nats per token)")
        self._print(f"run      {self.run.path} (loss.png, metrics.jsonl, checkpoints)")
        chats = config.data.conversations and self.data.tokenizer.special.chat_template is not None
        chat = command_line("chat", path_word(self.run.path))
        if not prompt.strip():
            prompt = typed_prompt(self.data.tokenizer, self.data.val, config.model.block_size)
        self._print(f"next     {chat if chats else sample_command(self.run.path, prompt)}")

    def _texts(self) -> list[str]:
        """Return the parts of the progress line: the step and its metrics, speed and time left, or the current activity."""
        metrics, stage = self._metrics, self._stage
        step = [f"step {self._step:>5}/{self._total}"]
        parts = [f"loss {metrics['loss']:.4f}"] if metrics else []
        if stage:
            return [*step, *parts, str(stage)]
        if "lr" in metrics:
            parts.append(f"lr {metrics['lr']:.2e}")
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
            if "mfu" in metrics:
                parts.append(f"mfu {metrics['mfu']:.0%}")
            parts.append(f"{duration(metrics['seconds_left'])} left")
        return step + parts

    def _line(self) -> RenderableType:
        """Render the progress line of a terminal."""
        step, *texts = self._texts()
        room = self.console.width - len("* ") - len(step) - sum(len("  ") + len(text) for text in texts) - 1
        bar = [ProgressBar(self._total, self._step, width=min(room, 16))] if room >= 4 else []
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._spinner, step, *bar, Text("  ".join(texts), no_wrap=True, overflow="ellipsis"))
        return grid

    def _tell_stages(self) -> None:
        """Without a terminal, print a line every `EVERY` seconds about a long activity."""
        with suppress(OSError):
            while not self._ended.wait(EVERY):
                if (stage := self._stage) and time.monotonic() - stage.started > EVERY / 2:
                    self._print("  ".join(self._texts()))

    def _introduce(self) -> None:
        config, mesh = self.program.layout.config, self.program.layout.mesh
        devices = mesh.devices.size
        kind = mesh.devices.flat[0].device_kind
        processes = f", in {count()} processes" if count() > 1 else ""
        n, lora = parameter_count(self.program.layout.abstract_weights), config.lora
        split = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        self._print(f"preset   {config.preset}, {n:,} parameters")
        if lora.rank:
            trained = parameter_count(self.program.layout.abstract_state.params)
            self._print(f"         LoRA of rank {lora.rank} on {lora.targets}: {trained:,} trainable parameters")
        text = f"{self.data.characters:,} characters, " if self.data.characters else ""
        self._print(f"data     {self.data.source}")
        held_out = f"{len(self.data.val):,} validation tokens" if self.data.held_out else "no validation tokens"
        vocabulary = self.data.tokenizer.vocab_size
        self._print(
            f"         {text}{len(self.data.train):,} training tokens, {held_out}, vocabulary of {vocabulary:,}"
        )
        size = config.model.vocab_size
        self._print(f"         uniform baseline: ln {size:,} = {math.log(size):.2f}")
        if size >= 2 * vocabulary:
            self.note(
                f"model.vocab_size {size} exceeds the tokenizer's {vocabulary} ids: the extra ids are trained but never "
                f"sampled; to match the tokenizer, use --model.vocab-size 0"
            )
        fits = config.data.conversations or self._prompt[0] == config.train.prompt
        if not fits and config.train.sample_tokens:
            self.note(
                f"train.prompt {config.train.prompt!r} does not fit this tokenizer or context length: the sample after "
                f"training starts from {self._prompt[0]!r} instead"
            )
        steps, warmup, rate = config.train.steps, config.optim.warmup_steps, config.optim.learning_rate
        if steps <= warmup and not self._step:
            self.note(
                f"training ends at step {steps:,}, within the {warmup:,} steps of learning-rate warmup: the rate reaches "
                f"{rate * steps / (warmup + 1):.2g} of {rate:g}; lower --optim.warmup-steps, or train longer"
            )
        self._print(f"devices  {devices} x {kind} ({jax.default_backend()}){': ' + split if split else ''}{processes}")
        if self.program.note:
            self._print(f"         {self.program.note}")
        self._print(f"run      {self.run.path}")

    def _sample(self, params: Any, prompt: str, ids: list[int]) -> str:
        config = self.program.layout.config
        params = jax.device_put(params, jax.local_devices()[0])
        lm = LM(config, unstack_layers(params, config.model.n_layer), self.data.tokenizer)
        room = config.train.sample_tokens
        if config.model.positions != "rope":
            room = min(room, config.model.block_size - len(ids) + 1)
        [out] = generate(lm, [ids if prompt else ""], max_new_tokens=room, key=config.train.seed)
        eos = lm.tokenizer.eos_id
        if eos is None or out.finish_reason != "stop":
            return out.text
        # Show the end token too. Decode it together with the text before it: a decoder may strip the first space of a text.
        before = ids if prompt else []
        return lm.tokenizer.decode([*before, *out.ids, eos])[len(lm.tokenizer.decode(before)) :]

    def _print(self, text: str) -> None:
        self.console.write(text)


def first_prompt(config: Config, tokenizer: Tokenizer, text: Split) -> tuple[str, list[int]]:
    """Choose the prompt of the sample at the end of training.

    This is `train.prompt`, truncated if it exceeds the context. If the tokenizer cannot encode it, because the user's text
    lacks characters of the preset's prompt, it is the first token of the text that can be typed. Of conversations, it is what
    precedes the first answer, unless `train.prompt` is set.

    Returns:
        The prompt to pass to `jaxgpt sample` ("" for none), and its ids.
    """
    context = config.model.block_size
    if isinstance(text, Packed) and config.train.prompt == TrainConfig.prompt and len(text.prompt()):
        return tokenizer.decode(text.prompt()), text.prompt().tolist()
    with suppress(UserError):
        ids = tokenizer.encode(config.train.prompt).tolist()
        if len(ids) > context:
            ids = ids[: max(context // 2, 1)]
            return tokenizer.decode(ids), ids
        if ids:
            return config.train.prompt, ids
    if not config.train.prompt:
        with suppress(UserError):
            return "", beginning(tokenizer)[0]
    for token in text.take(0, min(len(text), context)).tolist():
        word = tokenizer.decode([token])
        with suppress(UserError):
            if tokenizer.encode(word).tolist() == [token]:
                return word, [token]
    return "", beginning(tokenizer)[0]


def typed_prompt(tokenizer: Tokenizer, text: Split, context: int) -> str:
    """Return the first words of a text that fit in half of the context and can be typed; "" if there are none."""
    size = min(TYPED, context // 2)
    for line in map(str.strip, tokenizer.decode(text.take(0, min(len(text), TYPED * TYPED))).splitlines()):
        words = line[:size]
        typed = words if len(line) <= size else words.rpartition(" ")[0].rstrip() or words
        if not typed or not typed.isprintable():
            continue
        with suppress(UserError):
            ids = tokenizer.encode(typed)
            if len(ids) <= context // 2 and tokenizer.decode(ids) == typed:
                return typed
    return ""


def sample_command(run: Path, prompt: str) -> str:
    """Return the command that samples from a run, quoted for a shell."""
    words = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
    return command_line("sample", path_word(run), *(words if prompt else []))
