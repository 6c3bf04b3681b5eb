"""Report of a training run: a live line on a terminal, otherwise plain lines, and a summary at the end."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import kept_checkpoint_message
from jaxgpt.cli.background import Background, plot_losses, read_baselines, write_baselines
from jaxgpt.cli.console import Console
from jaxgpt.cli.output import ERROR_OF_DATA, command_line, note, path_word
from jaxgpt.cli.progress import EVERY, Activity, duration, live_line, progress
from jaxgpt.config import Config, TrainConfig
from jaxgpt.data import Batches, Data, Packed, Split, Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import start_ids
from jaxgpt.model.scan import unstack_layers
from jaxgpt.parallel.processes import gather_to_host, is_leader, process_count
from jaxgpt.signals import set_advice
from jaxgpt.trainer.evaluation import Evaluation, eval_params
from jaxgpt.trainer.metrics import parameter_count
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.report import Report
from jaxgpt.trainer.train import Outcome

LINE, WORDS, LETTERS = 256, 4, 40  # tokens that contain a line; words and characters of a prompt
PLAIN_EVERY = 5.0  # seconds between lines if standard output is not a terminal
WAIT = 10.0  # seconds to wait for the baselines at the end of a run; a resumed run computes missing baselines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        super().on_broken_pipe()
        note("standard output was closed: training continues without it (Ctrl-C stops and saves)")


class TrainReport(Report):
    """Print the progress and the results of a run. Process 0 prints for all processes."""

    program: Program
    data: Data
    run: Run

    def __init__(self) -> None:
        self.console = _Console(quiet=not is_leader())
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and is_leader()
        self._printed, self._evaluated = 0.0, False
        self._step, self._total, self._metrics = 0, 0, dict[str, float]()
        self._stage: Activity | None = Activity("starting")
        self._bar = live_line(self.console, lambda: (self._texts() or [""], self._step / max(self._total, 1)))
        self._ended = threading.Event()
        self._drawn = 0  # bytes of the metrics file in loss.png
        self._plot: Background | None = None  # set in process 0 when the run starts
        self._baselines: Background | None = None

    def __enter__(self) -> TrainReport:
        if self.live:
            self._bar.start()
        elif is_leader():
            threading.Thread(target=self._print_stages, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._plot and self._baselines and (kind is None or issubclass(kind, Exception)):
                if kind is None:
                    self._baselines.start()  # missing if a run was killed after its last step
                self._baselines.close(WAIT)
                self._plot.start()
                self._plot.close()
        finally:
            self._ended.set()
            if self.live:
                self._bar.stop()

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self.program, self.data, self.run = program, data, run
        config = program.layout.config
        self._step, self._total = step, config.train.steps
        self._prompt = first_prompt(config, data.tokenizer, data.val)
        self._introduce(config)
        set_advice(lambda: f"{kept_checkpoint_message(run.checkpoints)}; resume with: {self.resume_command}")
        if is_leader():
            self._plot = Background(self._draw, lambda e: self.note(f"cannot draw {run.plot}: {e}"))
            self._baselines = Background(
                lambda: write_baselines(data, run.baselines), lambda e: self.note(f"cannot write {run.baselines}: {e}")
            )

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        stage = self._stage
        if stage is None or stage.name != name:
            stage = Activity(name) if name else None
        if stage is not None:
            stage(done, total)
        self._stage = stage

    def compiled(self, seconds: float) -> None:
        self.console.write(f"         compiled in {seconds:.1f} s")
        if self._baselines:
            self._baselines.start()

    def progress(self, metrics: dict[str, float]) -> None:
        self._step, self._metrics = int(metrics["step"]) + 1, metrics
        if not self.live and time.monotonic() - self._printed > PLAIN_EVERY:
            self._printed = time.monotonic()
            self.console.write("  ".join(self._texts()))

    def evaluated(self, step: int, result: Evaluation) -> None:
        kind = "validation" if self.data.held_out else "training text"
        self.console.write(f"step {step:>5}: {kind} loss {result} ({result.tokens:,} tokens)")
        if not self._evaluated and math.isfinite(result.stderr):
            self.console.write(f"            {ERROR_OF_DATA}")
        self._evaluated = True
        if self._plot:
            self._plot.start()

    def note(self, text: str) -> None:
        if is_leader():
            note(text)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return command_line("train", "--resume", "--out", path_word(self.run.path))

    def finished(self, outcome: Outcome) -> None:
        """Print a sample, the run directory and the next command, or the command that resumes a stopped run."""
        if outcome.stopped:
            self.note(f"stopped and saved at step {outcome.step}; resume with: {self.resume_command}")
            return
        config = self.program.layout.config
        if outcome.step < config.train.steps:
            self.note(
                f"stopped early at step {outcome.step}: no lower validation loss in {config.train.patience} evaluations "
                f"(train.patience)"
            )
        prompt, ids = self._prompt
        params = eval_params(outcome.state, config) if config.train.sample_tokens else None
        params = gather_to_host(params if params is None else self.program.weights(params))
        if not is_leader():
            return
        if params is not None:
            try:
                with progress("compiling the sampler, and sampling"):
                    text = self._sample(params, prompt, ids)
                self.console.write(f"\n--- a sample, after {prompt!r} ---\n{prompt}{text}\n---\n")
            except UserError as e:  # too little memory for train.sample_tokens, after a complete run
                self.note(f"cannot sample: {e}")
        if losses := read_baselines(self.run.baselines):
            names = ", ".join(f"{name} {loss:.2f}" for name, loss in losses.items())
            self.console.write(f"baseline {names} (nats per token)")
        self.console.write(f"run      {self.run.path} (loss.png, metrics.jsonl, checkpoints)")
        chats = config.data.conversations and self.data.tokenizer.special.chat_template is not None
        chat = command_line("chat", path_word(self.run.path))
        self.console.write(
            f"next     {chat if chats else sample_command(self.run.path, prompt if prompt.strip() else '')}"
        )

    def _texts(self) -> list[str]:
        """Return the parts of the progress line: the step and its metrics, speed and time left, or the current activity."""
        metrics, stage = self._metrics, self._stage
        step = [f"step {self._step:>5}/{self._total}"] if self._total else []
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

    def _draw(self) -> None:
        """Draw loss.png, if there are new metrics."""
        size = self.run.metrics.stat().st_size
        if size != self._drawn:
            plot_losses(self.run, f"{self.program.layout.config.preset}: {self.run.path}")
            self._drawn = size

    def _print_stages(self) -> None:
        """Without a terminal, print a line every `EVERY` seconds about a long activity."""
        with suppress(OSError):
            while not self._ended.wait(EVERY):
                if (stage := self._stage) and time.monotonic() - stage.started > EVERY / 2:
                    self.console.write("  ".join(self._texts()))

    def _introduce(self, config: Config) -> None:
        layout, write = self.program.layout, self.console.write
        lora, tokenizer = config.lora, self.data.tokenizer
        write(f"preset   {config.preset}, {parameter_count(layout.abstract_weights):,} parameters")
        if lora.rank:
            trained = parameter_count(layout.abstract_state.params)
            write(f"         LoRA of rank {lora.rank} on {lora.targets}: {trained:,} trainable parameters")
        write(f"data     {self.data.source}")
        text = f"{self.data.characters:,} characters, " if self.data.characters else ""
        held_out = f"{len(self.data.val):,} validation tokens" if self.data.held_out else "no validation tokens"
        tokens = f"{len(self.data.train):,} training tokens, {held_out}"
        write(f"         {text}{tokens}, vocabulary of {tokenizer.vocab_size:,}")
        train, size = config.train, config.model.vocab_size
        epochs = train.steps * train.batch_size / Batches.of(config, self.data.train).per_epoch
        write(f"         {train.steps:,} steps of {train.batch_size:,} x {config.window:,} tokens: {epochs:.3g} epochs")
        write(f"         uniform baseline: ln {size:,} = {math.log(size):.2f}")
        for advice in self._advice(config, tokenizer):
            self.note(advice)
        devices = layout.mesh.devices
        split = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items() if size > 1)
        processes = f", in {process_count()} processes" if process_count() > 1 else ""
        kind = f"{devices.size} x {devices.flat[0].device_kind} ({jax.default_backend()})"
        write(f"devices  {kind}{': ' + split if split else ''}{processes}")
        if self.program.note:
            write(f"         {self.program.note}")
        write(f"run      {self.run.path}")

    def _advice(self, config: Config, tokenizer: Tokenizer) -> list[str]:
        """List what the user probably did not intend."""
        advice, train = [], config.train
        if config.model.vocab_size >= 2 * tokenizer.vocab_size:
            advice.append(
                f"model.vocab_size {config.model.vocab_size} exceeds the tokenizer's {tokenizer.vocab_size} ids: the extra ids "
                f"are trained but never sampled; to match the tokenizer, use --model.vocab-size 0"
            )
        if train.sample_tokens and train.prompt != TrainConfig.prompt and self._prompt[0] != train.prompt:
            advice.append(
                f"train.prompt {train.prompt!r} does not fit this tokenizer or context length: the sample after training "
                f"starts from {self._prompt[0]!r} instead"
            )
        warmup, rate = config.optim.warmup_steps, config.optim.learning_rate
        if train.steps <= warmup and not self._step:
            advice.append(
                f"training ends at step {train.steps:,}, within the {warmup:,} steps of learning-rate warmup: the rate reaches "
                f"{rate * train.steps / (warmup + 1):.2g} of {rate:g}; lower --optim.warmup-steps, or train longer"
            )
        return advice

    def _sample(self, params: Any, prompt: str, ids: list[int]) -> str:
        config = self.program.layout.config
        params = jax.device_put(params, jax.local_devices()[0])
        lm = LM(config, unstack_layers(params, config.model.n_layer), self.data.tokenizer)
        tokens = config.train.sample_tokens
        if config.model.positions != "rope":
            tokens = min(tokens, config.model.block_size - len(ids) + 1)
        [out] = generate(lm, [ids if prompt else ""], max_new_tokens=tokens, key=config.train.seed)
        eos = lm.tokenizer.eos_id
        if eos is None or out.finish_reason != "stop":
            return out.text
        # Show the end token too, decoded with the preceding text: a decoder may strip the first space of a text.
        before = ids if prompt else []
        return lm.tokenizer.decode([*before, *out.ids, eos])[len(lm.tokenizer.decode(before)) :]


def first_prompt(config: Config, tokenizer: Tokenizer, split: Split) -> tuple[str, list[int]]:
    """Choose the prompt of the sample at the end of training.

    It is `train.prompt`, truncated if it exceeds the context. Without this setting, it is the beginning of the validation data:
    the first words of a line, or the text before the first answer. If the tokenizer cannot encode it because the text lacks
    its characters, it is the first token of the text that can be typed.

    Args:
        config: config of the run.
        tokenizer: tokenizer of the data.
        split: validation data.

    Returns:
        The prompt for `jaxgpt sample` ("": no prompt), and its ids.
    """
    context, prompt = config.model.block_size, config.train.prompt
    if prompt == TrainConfig.prompt:
        if isinstance(split, Packed) and len(split.prompt()):
            return tokenizer.decode(split.prompt()), split.prompt().tolist()
        ids = split.take(0, min(len(split), LINE))
        lines = tokenizer.decode(ids[ids != tokenizer.eos_id]).split("\n")
        # The first line may be incomplete.
        words = next((line.split() for line in lines[1:] if line.strip()), lines[0].split())
        prompt = " ".join(words[:WORDS])[:LETTERS] or prompt
    with suppress(UserError):
        ids = tokenizer.encode(prompt).tolist()
        if len(ids) > context:
            ids = ids[: max(context // 2, 1)]
            return tokenizer.decode(ids), ids
        if ids:
            return prompt, ids
    if not prompt:
        with suppress(UserError):
            return "", start_ids(tokenizer)[0]
    for token in split.take(0, min(len(split), context)).tolist():
        text = tokenizer.decode([token])
        with suppress(UserError):
            if tokenizer.encode(text).tolist() == [token]:
                return text, [token]
    return "", start_ids(tokenizer)[0]


def sample_command(run: Path, prompt: str) -> str:
    """Return the command that samples from a run, quoted for a shell."""
    words = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
    return command_line("sample", path_word(run), *(words if prompt else []))
