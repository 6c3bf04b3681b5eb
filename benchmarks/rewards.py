"""Speed of training with rewards: a rollout and its update, in jaxgpt and in TRL, in one process.

python benchmarks/rewards.py                     (a Llama with 6 layers of 384)
python benchmarks/rewards.py --shape smollm2     (the shape of SmolLM2-135M)

Steps alternate. Both programs have the same random weights, prompts, number and length of answers, reward and loss (GRPO with
one epoch and without KL), AdamW, float32 and number of threads. Answers do not end early. TRL generates with transformers.
Needs torch, transformers and trl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

RATE = 1e-5
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"vocab_size": 8192, "n_layer": 6, "n_head": 6, "n_embd": 384, "n_inner": 1024},
    "smollm2": {"vocab_size": 49152, "n_layer": 30, "n_head": 9, "n_kv_head": 3, "n_embd": 576, "n_inner": 1536},
}


def distinct(texts: Sequence[str]) -> list[float]:
    """Return the fraction of different words of each text: a reward that differs between answers."""
    fractions = []
    for text in texts:
        words = text.split()
        fractions.append(len(set(words)) / max(len(words), 1))
    return fractions


class Clock:
    """Seconds of each step, and of its rollout."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.rollouts: list[float] = []

    @contextmanager
    def rollout(self) -> Any:
        began = time.perf_counter()
        yield
        self.rollouts.append(time.perf_counter() - began)

    def report(self, name: str, tokens: int) -> dict[str, Any]:
        """Print and return the medians without the first step, which compiles or allocates."""
        step = statistics.median(self.steps[1:])
        rollout = statistics.median(self.rollouts[1:])
        print(
            f"{name:8}{step:8.3f} s per step ({min(self.steps[1:]):.3f} to {max(self.steps[1:]):.3f}), "
            f"rollout {rollout:.3f} s ({rollout / step:.0%}), {tokens / rollout:,.0f} tokens/s",
            flush=True,
        )
        return {"step": step, "rollout": rollout, "tokens_per_second": tokens / rollout, "steps": self.steps}


def write_model(shape: str, path: Path) -> None:
    """Write a Llama with random weights, and a tokenizer of words without an end-of-text token."""
    import jax

    import jaxgpt
    from jaxgpt.config import Config, ModelConfig
    from jaxgpt.data.tokenizers.base import WordTokenizer
    from jaxgpt.model.init import init_params

    llama = {"positions": "rope", "norm": "rmsnorm", "mlp": "gated", "activation": "silu", "bias": False}
    model = ModelConfig(block_size=512, **llama, **SHAPES[shape])
    params = jax.jit(lambda: init_params(jaxgpt.GPT(model), 0))()
    tokenizer = WordTokenizer(f"w{i}" for i in range(model.vocab_size))
    jaxgpt.save(jaxgpt.LM(Config(model=model), params, tokenizer), path)


def write_prompts(path: Path, words: int) -> None:
    """Write 64 prompts of `words` words each."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(64):
        chosen = [f"w{i}" for i in rng.integers(1, 8192, words)]
        lines.append(json.dumps({"prompt": " ".join(chosen)}))
    path.write_text("\n".join(lines))


def ours(run: Path, prompts: Path, args: argparse.Namespace, clock: Clock) -> Callable[[], None]:
    """Return a function that takes a step in jaxgpt."""
    import jax

    import jaxgpt
    from jaxgpt.config import DataConfig, MeshConfig, OptimConfig, PostConfig, TrainConfig
    from jaxgpt.data import open_data
    from jaxgpt.parallel.host import use_cores
    from jaxgpt.parallel.temporaries import keep_memory
    from jaxgpt.post import rollouts
    from jaxgpt.post.start import build_program

    rows = args.prompts * args.group
    use_cores(MeshConfig(data=args.devices))
    lm = jaxgpt.load(run)
    config = replace(
        lm.config,
        data=DataConfig(path=str(prompts), dataset="none", window=args.prompt_tokens + args.new),
        post=PostConfig(objective="grpo", reward=("json",), group=args.group, max_new_tokens=args.new),
        optim=OptimConfig(learning_rate=RATE, schedule="constant", warmup_steps=0, weight_decay=0.0),
        train=TrainConfig(steps=1000, batch_size=rows, eval_every=1000, sample_tokens=0),
        mesh=MeshConfig(data=args.devices),
    )
    keep_memory(config)
    data = open_data(config, lm.tokenizer)
    program = build_program(config)
    feed = rollouts.Rollouts(program, data, None, reward=lambda prompts, texts, records: distinct(texts))
    state = program.init(lm.params)
    sample = rollouts.sample

    def timed(*given: Any) -> Any:
        with clock.rollout():
            answers = sample(*given)
        assert all(len(answer.ids) == args.new for answer in answers), "answers must not end early"
        return answers

    def step() -> None:
        nonlocal state
        number = len(clock.steps)
        began = time.perf_counter()
        with mock.patch.object(rollouts, "sample", timed):
            batches = program.batches.put_for_call(feed.at(range(number, number + 1), state))
        state, metrics = program.step(state, batches)
        jax.block_until_ready(metrics)
        clock.steps.append(time.perf_counter() - began)

    return step


def alternate_with_trl(
    folder: Path, prompts: Path, args: argparse.Namespace, clock: Clock, other: Callable[[], None]
) -> None:
    """Train with TRL, and call `other` after each step."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rows = args.prompts * args.group
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "w0"  # TRL needs a name; `generation_kwargs` removes its effect
    tokenizer.pad_token = "w0"
    began = time.perf_counter()

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *given: Any) -> Any:
            with clock.rollout():
                found = super()._generate_single_turn(*given)
            assert all(len(ids) == args.new for ids in found[0]), "answers must not end early"
            return found

    class Alternate(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            nonlocal began
            clock.steps.append(time.perf_counter() - began)
            other()
            began = time.perf_counter()

    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=rows,
        num_generations=args.group,
        max_completion_length=args.new,
        generation_kwargs={"eos_token_id": None},
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_steps=args.steps + 1,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Timed(
        model,
        lambda completions, **_: distinct(completions),
        config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[Alternate()],
    )
    trainer.eos_token_ids = []
    began = time.perf_counter()
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--devices", type=int, default=-1)
    args = parser.parse_args()
    tokens = args.prompts * args.group * args.new

    from jaxgpt.convert.export_model import export_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        write_model(args.shape, run)
        export_model(str(run), folder / "hf")
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, args.prompt_tokens)
        our_clock = Clock()
        their_clock = Clock()
        step = ours(run, prompts, args, our_clock)
        alternate_with_trl(folder / "hf", prompts, args, their_clock, step)
        found = {"trl": their_clock.report("TRL", tokens), "jaxgpt": our_clock.report("jaxgpt", tokens)}
    for name in ("step", "rollout"):
        print(f"{name}: {found['trl'][name] / found['jaxgpt'][name]:.2f}x faster than TRL")
    packages = {name: version(name) for name in ("jax", "jaxlib", "torch", "transformers", "trl")}
    print(json.dumps({"python": platform.python_version(), **packages, "args": vars(args), **found}))


if __name__ == "__main__":
    main()
