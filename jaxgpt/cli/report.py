"""Report of a training run: introduction, progress line, evaluations, loss.png, and a summary with a sample at the end."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import kept_checkpoint_message
from jaxgpt.cli.console import Console
from jaxgpt.cli.output import ERROR_OF_DATA, aligned, command_line, note, path_word
from jaxgpt.cli.plot import draw_run, read_baselines
from jaxgpt.cli.progress import Activity, duration, progress, shown
from jaxgpt.config import Config, TrainConfig
from jaxgpt.data import Batches, Data, Packed, Split, Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import write_json
from jaxgpt.lm import LM, generate
from jaxgpt.model.scan import unstack_layers
from jaxgpt.parallel.processes import gather_to_host, is_leader, process_count
from jaxgpt.report.baselines import baselines
from jaxgpt.signals import set_advice
from jaxgpt.trainer.evaluation import Evaluation, eval_params
from jaxgpt.trainer.metrics import parameter_count
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.report import Report
from jaxgpt.trainer.train import Outcome

LINE, WORDS, LETTERS = 256, 4, 40  # tokens that contain a line; words and characters of a prompt
PLOT_EVERY = 30.0  # seconds between two drawings of loss.png, which takes 0.1 s


class TrainReport(Report):
    """Print the progress and the results of a run. Process 0 prints for all processes. Use as a context manager."""

    program: Program
    data: Data
    run: Run

    def __init__(self) -> None:
        self.console = Console(quiet=not is_leader())
        self._step, self._total, self._metrics = 0, 0, dict[str, float]()
        self._stage: Activity | None = Activity("starting")
        self._drawn = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> TrainReport:
        self._stack.enter_context(shown(self._line, self.console))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self.program, self.data, self.run = program, data, run
        config = program.layout.config
        self._step, self._total = step, config.train.steps
        set_advice(lambda: f"{kept_checkpoint_message(run.checkpoints)}; resume with: {self.resume_command}")
        self.console.write(aligned(self._introduction(config)))
        for advice in unintended(config, data.tokenizer, step):
            self.note(advice)
        if is_leader():
            if not run.baselines.exists() and (found := baselines(data)):
                write_json(run.baselines, found)
            self._stack.callback(self._draw)  # even if the run is stopped or fails

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        if self._stage is None or self._stage.name != name:
            self._stage = Activity(name) if name else None
        if self._stage:
            self._stage(done, total)

    def compiled(self, seconds: float) -> None:
        self.console.write(f"         compiled in {seconds:.1f} s")

    def progress(self, metrics: dict[str, float]) -> None:
        self._step, self._metrics = int(metrics["step"]) + 1, metrics

    def evaluated(self, step: int, result: Evaluation) -> None:
        kind = "validation" if self.data.held_out else "training text"
        self.console.write(f"step {step:>5}: {kind} loss {result} ({result.tokens:,} tokens)")
        if step == self._total and math.isfinite(result.stderr):
            self.console.write(f"            {ERROR_OF_DATA}")
        if is_leader() and time.monotonic() - self._drawn > PLOT_EVERY:
            self._draw()

    def note(self, text: str) -> None:
        if is_leader():
            note(text)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return command_line("train", "--resume", "--out", path_word(self.run.path))

    def finished(self, outcome: Outcome) -> None:
        """Print a sample, the run directory and the next command, or the command that resumes a stopped run."""
        config = self.program.layout.config
        if outcome.stopped:
            self.note(f"stopped and saved at step {outcome.step}; resume with: {self.resume_command}")
            return
        if outcome.step < config.train.steps:
            self.note(
                f"stopped early at step {outcome.step}: no lower validation loss in {config.train.patience} evaluations "
                f"(train.patience)"
            )
        params = None
        if config.train.sample_tokens:
            params = gather_to_host(self.program.weights(eval_params(outcome.state, config)))
        if not is_leader():
            return
        prompt, ids = first_prompt(config, self.data.tokenizer, self.data.val)
        if params is not None:
            try:
                with progress("compiling the sampler, and sampling"):
                    text = self._sample(params, ids)
                self.console.write(f"\n--- a sample, after {prompt!r} ---\n{text}\n---\n")
            except UserError as e:  # such as too little memory: the run is complete
                self.note(f"cannot sample: {e}")
        losses = ", ".join(f"{name} {loss:.2f}" for name, loss in read_baselines(self.run).items())
        chats = config.data.conversations and self.data.tokenizer.special.chat_template is not None
        following = command_line("chat", path_word(self.run.path)) if chats else ""
        summary = {
            "baseline": f"{losses} (nats per token)" if losses else "",
            "run": f"{self.run.path} (loss.png, metrics.jsonl, checkpoints)",
            "next": following or sample_command(self.run.path, prompt if prompt.strip() else ""),
        }
        self.console.write(aligned(summary))

    def _line(self) -> str:
        """Return the progress line: the step and its loss, and the current activity or the speed and the time left."""
        metrics = self._metrics
        parts = [f"step {self._step:>5}/{self._total}"] if self._total else []
        if metrics:
            parts.append(f"loss {metrics['loss']:.4f}")
        if stage := self._stage:
            return "  ".join([*parts, str(stage)])
        if "lr" in metrics:
            parts.append(f"lr {metrics['lr']:.2e}")
        if "mfu" in metrics:
            parts.append(f"mfu {metrics['mfu']:.0%}")
        if "tokens_per_second" in metrics:
            parts += [f"{metrics['tokens_per_second']:,.0f} tok/s", f"{duration(metrics['seconds_left'])} left"]
        return "  ".join(parts)

    def _introduction(self, config: Config) -> dict[str, str | list[str]]:
        """Return the model, the data, the devices and the directory of the run, by label."""
        layout, data, lora, train, V = (
            self.program.layout,
            self.data,
            config.lora,
            config.train,
            config.model.vocab_size,
        )
        model = [f"{config.preset}, {parameter_count(layout.abstract_weights):,} parameters"]
        if lora.rank:
            trained = parameter_count(layout.abstract_state.params)
            model.append(f"LoRA of rank {lora.rank} on {lora.targets}: {trained:,} trainable parameters")
        text = f"{data.characters:,} characters, " if data.characters else ""
        held_out = f"{len(data.val):,} validation tokens" if data.held_out else "no validation tokens"
        epochs = train.steps * train.batch_size / Batches.of(config, data.train).per_epoch
        mesh = layout.mesh
        devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.default_backend()})"
        if split := " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1):
            devices += f": {split}"
        if process_count() > 1:
            devices += f", in {process_count()} processes"
        return {
            "preset": model,
            "data": [
                data.source,
                f"{text}{len(data.train):,} training tokens, {held_out}, vocabulary of {data.tokenizer.vocab_size:,}",
                f"{train.steps:,} steps of {train.batch_size:,} x {config.window:,} tokens: {epochs:.3g} epochs",
                f"uniform baseline: ln {V:,} = {math.log(V):.2f}",
            ],
            "devices": [devices, self.program.note],
            "run": str(self.run.path),
        }

    def _draw(self) -> None:
        """Draw loss.png. A failure does not fail the run."""
        try:
            with suppress(UserError):  # no losses yet
                draw_run(self.run, f"{self.program.layout.config.preset}: {self.run.path}")
        except Exception as e:
            self.note(f"cannot draw {self.run.plot}: {e}")
        self._drawn = time.monotonic()

    def _sample(self, params: Any, ids: list[int]) -> str:
        """Sample after a prompt. The text includes the prompt, and an end token if it ended the text."""
        config, tokenizer = self.program.layout.config, self.data.tokenizer
        params = jax.device_put(params, jax.local_devices()[0])
        lm = LM(config, unstack_layers(params, config.model.n_layer), tokenizer)
        tokens = config.train.sample_tokens
        if config.model.positions != "rope":
            tokens = min(tokens, config.model.block_size - max(len(ids), 1) + 1)
        [out] = generate(lm, [ids or ""], max_new_tokens=tokens, key=config.train.seed)
        text = [*ids, *out.ids]
        if out.finish_reason == "stop" and tokenizer.eos_id is not None:
            text.append(tokenizer.eos_id)
        return tokenizer.decode(text)


def unintended(config: Config, tokenizer: Tokenizer, step: int) -> list[str]:
    """List what the user probably did not intend, for a run that starts at a step."""
    advice, (steps, warmup) = [], (config.train.steps, config.optim.warmup_steps)
    if config.model.vocab_size >= 2 * tokenizer.vocab_size:
        advice.append(
            f"model.vocab_size {config.model.vocab_size} exceeds the tokenizer's {tokenizer.vocab_size} ids: the extra ids "
            f"are trained but never sampled; to match the tokenizer, use --model.vocab-size 0"
        )
    if steps <= warmup and not step:
        rate = config.optim.learning_rate
        advice.append(
            f"training ends at step {steps:,}, within the {warmup:,} steps of learning-rate warmup: the rate reaches "
            f"{rate * steps / (warmup + 1):.2g} of {rate:g}; lower --optim.warmup-steps, or train longer"
        )
    return advice


def first_prompt(config: Config, tokenizer: Tokenizer, split: Split) -> tuple[str, list[int]]:
    """Choose the prompt of the sample after training.

    It is `train.prompt`, truncated if it exceeds the context. By default, or if the tokenizer cannot encode it, it is the
    beginning of the validation data: the first words of a line, or the text before the first answer.

    Returns:
        The prompt for `jaxgpt sample` ("": no prompt), and its ids.
    """
    wanted, context = config.train.prompt, config.model.block_size
    if wanted == TrainConfig.prompt and isinstance(split, Packed) and len(ids := split.prompt()):
        return tokenizer.decode(ids), ids.tolist()
    ids = split.take(0, min(len(split), LINE))
    lines = tokenizer.decode(ids[ids != tokenizer.eos_id]).split("\n")
    # The first line may be incomplete.
    words = next((line.split() for line in lines[1:] if line.strip()), lines[0].split())
    prompts = [" ".join(words[:WORDS])[:LETTERS]]
    if wanted != TrainConfig.prompt:
        prompts.insert(0, wanted)
    for prompt in prompts if wanted else ():
        with suppress(UserError):
            if ids := tokenizer.encode(prompt).tolist():
                ids = ids if len(ids) <= context else ids[: max(context // 2, 1)]
                return tokenizer.decode(ids), ids
    return "", []


def sample_command(run: Path, prompt: str) -> str:
    """Return the command that samples from a run, quoted for a shell."""
    words = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
    return command_line("sample", path_word(run), *(words if prompt else []))
