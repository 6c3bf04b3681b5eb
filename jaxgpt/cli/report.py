"""What `jaxgpt train` shows: a live line on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

import jax
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxgpt.cli.console import Console
from jaxgpt.cli.parse import note
from jaxgpt.config import UserError
from jaxgpt.data import Dataset
from jaxgpt.lm import LM, generate
from jaxgpt.model.scan import unstack_layers
from jaxgpt.parallel.processes import collected, count, leader
from jaxgpt.train.build import Program
from jaxgpt.train.evaluate import Evaluation, eval_params
from jaxgpt.train.loop import Outcome
from jaxgpt.train.metrics import parameter_count
from jaxgpt.train.run import Run

PLAIN_EVERY = 5.0  # seconds between lines where there is no terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        super().on_broken_pipe()
        note("standard output was closed: training continues without it (Ctrl-C stops and saves)")


class Report:
    """Tells a person how a run goes."""

    def __init__(self, program: Program, data: Dataset, run: Run, step: int = 0) -> None:
        """
        Args:
            program, data, run: what is trained, on what, and where it is kept.
            step: where it starts or resumes, for the progress bar.
        """
        self.program, self.data, self.run = program, data, run
        self.console = _Console(quiet=not leader())
        self.live = self.console.is_terminal and leader()
        self._spoke = 0.0
        self._bar = Progress(
            TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("compiling", total=program.config.train.steps, completed=step)

    def __enter__(self) -> Report:
        self._introduce()
        if self.live:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live:
            self._bar.stop()

    def progress(self, figures: dict[str, float]) -> None:
        speed = f"{figures['tokens_per_second']:,.0f} tok/s" if "tokens_per_second" in figures else "compiled"
        rate = f"lr {figures['lr']:.2e}  " if "lr" in figures else ""  # another optimizer's is not known
        line = f"loss {figures['loss']:.4f}  {rate}{speed}"
        step, total = int(figures["step"]), self.program.config.train.steps
        if self.live:
            self._bar.update(self._task, completed=step + 1, description=line)
        elif time.monotonic() - self._spoke > PLAIN_EVERY:
            self._spoke = time.monotonic()
            left = figures["elapsed_seconds"] / (step + 1) * (total - step - 1)
            self._print(f"step {step:>5}/{total}  {line}  {left:.0f} s left")

    def evaluated(self, step: int, result: Evaluation) -> None:
        kind = "validation" if self.data.held_out else "training text"
        self._print(f"step {step:>5}: {kind} loss {result.loss:.4f} +- {result.stderr:.4f} ({result.tokens:,} tokens)")

    def note(self, text: str) -> None:
        if leader():
            note(text)

    def finished(self, outcome: Outcome) -> None:
        """The sample, and where to go from here."""
        if self.live:
            self._bar.stop()
        config = self.program.config
        params = eval_params(outcome.state, config) if config.train.sample_tokens else None
        params = collected(params)
        if not leader():
            return
        if params is not None:
            prompt, text = self._sample(params)
            self._print(f"\n--- a sample, after {prompt!r} ---\n{prompt}{self.data.tokenizer.glue}{text}\n---\n")
        self._print(f"run      {self.run.path} (loss.png, metrics.jsonl, checkpoints)")
        self._print(f"next     jaxgpt sample {self.run.path} --prompt {_quote(config.train.prompt)}")

    def _introduce(self) -> None:
        config, mesh = self.program.config, self.program.mesh
        devices = mesh.devices.size
        kind = mesh.devices.flat[0].device_kind
        processes = f", in {count()} processes" if count() > 1 else ""
        n = parameter_count(self.program.abstract_state.params)
        split = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        self._print(f"preset   {config.preset}, {n:,} parameters")
        text = f"{self.data.characters:,} characters, " if self.data.characters else ""
        self._print(f"data     {self.data.source}")
        held_out = f"{len(self.data.val):,} held out" if self.data.held_out else "none held out"
        vocabulary = self.data.tokenizer.vocab_size
        self._print(f"         {text}{vocabulary:,} different ids; {len(self.data.train):,} to train on, {held_out}")
        self._print(f"         a guess among all ids has a loss of {math.log(vocabulary):.2f}")
        self._print(f"devices  {devices} x {kind} ({jax.default_backend()}){': ' + split if split else ''}{processes}")
        if self.program.note:
            self._print(f"         {self.program.note}")
        self._print(f"run      {self.run.path}")

    def _sample(self, params: Any) -> tuple[str, str]:
        config = self.program.config
        params = jax.device_put(params, jax.local_devices()[0])
        lm = LM(config, unstack_layers(params, config.model.n_layer), self.data.tokenizer)
        prompt = config.train.prompt
        try:
            ids = lm.tokenizer.encode(prompt).tolist()
        except UserError:
            # A text of the user's own may lack the preset's prompt.
            ids = self.data.val.take(0, 1).tolist()
            prompt = lm.tokenizer.decode(ids)
        room = config.train.sample_tokens
        if config.model.positions != "rope":
            room = min(room, config.model.block_size - len(ids) + 1)
        [out] = generate(lm, [ids], max_new_tokens=room, temperature=0.8, key=jax.random.key(config.train.seed))
        eos = lm.tokenizer.eos_id
        ids = out.ids if eos is None or out.finish_reason == "length" else [*out.ids, eos]
        return prompt, lm.tokenizer.decode(ids)

    def _print(self, text: str) -> None:
        self.console.write(text)


def _quote(text: str) -> str:
    """A prompt as one types it in a shell."""
    return '"' + text.replace("\n", "\\n") + '"' if text.strip() else '"..."'
