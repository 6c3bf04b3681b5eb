"""Prints a training run: introduction, progress line, evaluations, plot, sample and summary."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.draw import draw_run
from jaxgpt.cli.output import ERROR_OF_DATA, ERROR_OF_PAIRS, Console, aligned, line_shown, note, progress
from jaxgpt.cli.settings import origin
from jaxgpt.config import Config, TrainConfig
from jaxgpt.counts import parameter_count
from jaxgpt.data import Batches, Data, Packed, Preferences, PromptSplit, Split
from jaxgpt.data.bos import decode_texts
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError, plural
from jaxgpt.files import write_json
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import encode_prompt
from jaxgpt.model.scan import unstack_layers
from jaxgpt.parallel.processes import gather_to_host, is_leader, process_count
from jaxgpt.post.preference import pair_loss
from jaxgpt.post.reference import is_once
from jaxgpt.progress import Progress, duration
from jaxgpt.report.baselines import baselines, read_baselines
from jaxgpt.signals import set_advice
from jaxgpt.trainer.evaluation import Evaluation, Result
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.program import Program

QUOTES = set("'\"`\\$!")  # characters that make a word hard to read in a command; such words are skipped
LINE = 256  # maximum number of tokens decoded to find a line for the default prompt
WORDS = 4  # maximum number of words of the default prompt
LETTERS = 40  # maximum number of characters of the default prompt
SHOWN = ("accuracy", "margin")  # sums of an objective that are printed with its loss
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

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self.program = program
        self.data = data
        self.run = run
        config = program.config
        self._step = step
        self._total = config.train.steps
        set_advice(lambda: f"{kept_checkpoint_message(run.checkpoints)}; resume with: {self.resume_command}")
        self.console.write(aligned(self._introduction(config)))
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
        """The word for the examples of the data."""
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
            params = gather_to_host(self.program.weights(outcome.state.eval_params))
        if is_leader():
            prompt = self._print_sample(params)
            self.console.write(aligned(self._summary(prompt)))

    def _print_sample(self, params: Any) -> str:
        """Print a sample, unless `params` is None, and return its prompt."""
        prompt = ""
        try:
            ids = first_prompt(self.program.config, self.data.tokenizer, self.data.val, self.data.bos_ids)
            prompt = self.data.tokenizer.decode(without_bos(self.data.tokenizer, ids))
            if params is not None:
                with progress("compiling the sampler, and sampling"):
                    text = self._sample(params, ids)
                self.console.write(f"\n--- a sample, after {prompt!r} ---\n{text}\n{self._sample_end()}\n")
        except UserError as e:  # for example, out of memory, which must not fail a complete run
            self.note(f"cannot sample: {e}")
        return prompt

    def _sample_end(self) -> str:
        """Return the line after the sample; for conversations and pairs, it has the answer of the data."""
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
        """Write baselines.json, unless it is of the same data; a resumed run may change its mixture."""
        with suppress(UserError):
            recorded = read_baselines(self.run.path)
            if recorded["losses"] and recorded.get("data") == self.data.fingerprint:
                return

        path = self.run.path / "baselines.json"
        found = baselines(self.data) if self.program.config.post.objective == "next-token" else {}
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

    def _introduction(self, config: Config) -> dict[str, str | list[str]]:
        """Return a dict that describes the model, data, devices and directory of the run, keyed by label."""
        model = [f"{config.preset or 'none'}, {parameter_count(self.program.abstract_weights):,} parameters"]
        if config.lora.rank:
            trained = parameter_count(self.program.abstract_state.params)
            model.append(f"LoRA of rank {config.lora.rank} on {config.lora.targets}: {trained:,} trainable parameters")
        return {
            "preset": model,
            "weights": f"started from {origin(config)}" if config.init_from else "",
            "data": self._describe_data(config),
            "devices": [self._describe_devices(), self.program.note],
            "run": str(self.run.path),
        }

    def _describe_data(self, config: Config) -> list[str]:
        """Return lines about the data, the length of the training, and the uniform baseline."""
        data = self.data
        train = config.train
        if config.post.is_rollout:
            return [data.source, *self._describe_rollouts(config)]

        rows = f"{train.batch_size:,} x {config.window:,} tokens"
        if config.post.is_preference:
            rows = f"{train.batch_size:,} pairs x 2 x {config.window:,} tokens"
            baseline = self._describe_objective(config)
        elif config.post.is_distillation:
            baseline = _distillation(config)
        else:
            V = config.model.vocab_size
            baseline = f"uniform baseline: ln {V:,} = {math.log(V):.2f}"

        text = f"{data.characters:,} characters, " if data.characters else ""
        held_out = f"{len(data.val):,} validation tokens" if data.held_out else "no validation tokens"
        epochs = train.steps * train.batch_size / Batches.of(config, data.train).per_epoch
        return [
            data.source,
            f"{text}{len(data.train):,} training tokens, {held_out}, vocabulary of {data.tokenizer.vocab_size:,}",
            f"{train.steps:,} steps of {rows}: {epochs:.3g} epochs",
            baseline,
            self._describe_reference(config, epochs),
        ]

    def _describe_objective(self, config: Config) -> str:
        """Return the objective of a run on preference pairs, its reference, and the loss of equal scores."""
        post = config.post
        text = f"objective: {post.objective}, beta {post.beta:g}"
        if post.has_reference and config.lora.rank:
            text += ", reference: the frozen base"
        elif post.has_reference:
            text += f", reference: {post.reference or 'the initial weights'}"
        if post.objective == "orpo" or post.sft:
            return text
        equal = float(pair_loss(jnp.zeros((1, 2)), post)[0])
        return f"{text}; loss without a preference: {equal:.4f}"

    def _describe_reference(self, config: Config, epochs: float) -> str:
        """Return when a run on preference pairs computes its reference, or "" without one."""
        post = config.post
        if not (post.is_preference and post.has_reference):
            return ""
        if is_once(config):
            kept = "" if config.lora.rank else ", so no copy is in memory during training"
            return f"reference: computed once for each pair, before the first step{kept}"
        text = "reference: computed at every step"
        if not config.lora.rank:
            return f"{text}, from a copy of the weights in memory"
        if epochs > 1:
            return f"{text}, {epochs:.3g} times for each pair; --post.reference-log-p once computes it once"
        return text

    def _describe_rollouts(self, config: Config) -> list[str]:
        """Return lines about the rollouts and the objective of a run with rewards or a teacher."""
        post = config.post
        train = config.train
        objective = _distillation(config)
        if post.has_rewards:
            kl = f", kl {post.kl:g} ({post.kl_estimator})" if post.kl else ""
            objective = f"objective: {post.objective}, reward {' '.join(post.reward)}{kl}"
        return [
            f"{train.steps:,} steps of {train.batch_size:,} answers; {plural(train.steps_per_call, 'step')} per rollout of "
            f"{config.rollout_answers:,} answers, {post.answers_per_prompt} to each prompt, "
            f"{plural(post.rollout_epochs, 'epoch')}",
            objective,
        ]

    def _describe_devices(self) -> str:
        """Return the number and kind of the devices, the mesh and the number of processes."""
        mesh = self.program.mesh
        devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.default_backend()})"
        split = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        if split:
            devices += f": {split}"
        if process_count() > 1:
            devices += f", in {process_count()} processes"
        return devices

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

    def _sample(self, params: Any, ids: list[int]) -> str:
        """Return a prompt followed by a sample that continues it."""
        config = self.program.config
        tokenizer = self.data.tokenizer
        params = jax.device_put(params, jax.local_devices()[0])
        lm = LM(config, unstack_layers(params, config.model.n_layer), tokenizer)
        tokens = config.train.sample_tokens
        if config.model.positions != "rope":
            tokens = min(tokens, config.model.block_size - max(len(ids), 1) + 1)
        [out] = generate(lm, [ids or ""], max_new_tokens=tokens, key=config.train.seed)
        return tokenizer.decode([*without_bos(tokenizer, ids), *out.ids])


def first_prompt(config: Config, tokenizer: Tokenizer, split: Split, bos_ids: Sequence[int] = ()) -> list[int]:
    """Return the ids of `train.prompt`; if they exceed the context, truncate them to half its length.

    The default prompt consists of the first words of a line of the validation data or, for conversations and preference
    pairs, the text before the first target. `bos_ids`: beginning-of-text ids that the data record.
    """
    prompt = config.train.prompt
    if prompt == TrainConfig.prompt:
        if isinstance(split, Packed | Preferences | PromptSplit):
            before_target = split.prompt()
            if len(before_target):
                return before_target.tolist()
        prompt = _first_words(tokenizer, split, bos_ids)
    encoded = encode_prompt(tokenizer, tokenizer.vocab_size, prompt)
    context = config.model.block_size
    if len(encoded) <= context:
        return encoded
    return encoded[: max(context // 2, 1)]


def _first_words(tokenizer: Tokenizer, split: Split, bos_ids: Sequence[int]) -> str:
    """Return the first words of a line; words with quotes are skipped if possible."""
    ids = split.take(0, min(len(split), LINE))
    first, *others = decode_texts(tokenizer, ids, bos_ids).split("\n")
    # Skip the first line if possible: it may be incomplete.
    line = next((line for line in others if line.strip()), first)
    words = line.split()
    without_quotes = [word for word in words if not QUOTES.intersection(word)]
    return " ".join((without_quotes or words)[:WORDS])[:LETTERS]


def without_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the ids of a prompt without the ids that `jaxgpt sample` prepends to it."""
    bos = list(tokenizer.bos_ids)
    return ids[len(bos) :] if ids[: len(bos)] == bos else ids


def sample_command(run: Path, prompt: str) -> str:
    """Return the command that samples from a run, quoted for a shell."""
    words = ["jaxgpt", "sample", str(run)]
    if prompt.startswith("-"):
        words.append(f"--prompt={prompt}")
    elif prompt.strip():
        words += ["--prompt", prompt]
    return shlex.join(words)


def _distillation(config: Config) -> str:
    """Return a line about the objective of a distillation."""
    post = config.post
    beta = f" (beta {post.jsd_beta:g})" if post.divergence == "jsd" else ""
    return f"objective: {post.objective}, {post.divergence} divergence{beta} from {post.reference}"
