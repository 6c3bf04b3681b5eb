"""Replay a training run recorded from a different trainer, in nanoGPT's format.

Usage: `python benchmarks/replay.py DIR [--steps N] [--json]`

DIR contains the recipe of the run (recipe.json, with the path of the text), the initial weights (init.safetensors) and the
window offsets (offsets.npz). Prints the losses at each recorded evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.convert.files import open_safetensors
from jaxgpt.convert.gpt2 import NANOGPT
from jaxgpt.convert.options import Options
from jaxgpt.convert.read_weights import StoredModel, load_weights
from jaxgpt.data import Tokens
from jaxgpt.data.text import read_path
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import read_json
from jaxgpt.parallel.host import use_cores
from jaxgpt.trainer.build import build
from jaxgpt.trainer.program import Program

TRAIN, VAL = 0, 1


@dataclass(frozen=True)
class Recording:
    """A validated recording of a run.

    Attributes:
        config: settings of the run, converted from the recipe.
        params: initial weights.
        splits: token ids of the training and validation splits.
        split_n: index in `splits` of each draw, a microbatch of windows.
        offsets_nB: offsets of the windows of each draw.
        eval_iters: number of draws from each split in an evaluation.
        last: step at which the replay ends, before its update.
    """

    config: Config
    params: Any
    splits: tuple[Tokens, Tokens]
    split_n: np.ndarray
    offsets_nB: np.ndarray
    eval_iters: int
    last: int


def open_recording(path: Path, steps: int) -> Recording:
    """Read and validate a recording.

    Args:
        path: directory with recipe.json, init.safetensors and offsets.npz; the recipe contains the path of the text.
        steps: maximum number of steps to replay; 0: all.

    Raises:
        UserError: if a file or setting is missing or invalid, or the files do not match each other.
    """
    for name in ("recipe.json", "init.safetensors", "offsets.npz"):
        if not (path / name).is_file():
            raise UserError(
                f"{path} is not a recording: it has no {name} (expected: recipe.json, init.safetensors, offsets.npz)"
            )
    recipe = read_json(path / "recipe.json")
    with np.load(path / "offsets.npz") as arrays:
        split_n, offsets_nB = arrays["split"], arrays["ix"]
    text = read_path(path / str(recipe.get("text"))).text
    tokenizer = CharTokenizer(text)
    options = Options(recipe, "recipe.json")
    config = config_from_recipe(options, tokenizer.vocab_size)
    fraction, eval_iters = options.read("train_fraction", 0.9), options.read("eval_iters", int)
    ids = Tokens([tokenizer.encode(text)])
    splits = ids.split(int(fraction * len(ids)))
    last = min(steps or config.train.steps - 1, config.train.steps - 1)
    micro = config.train.batch_size // config.train.accumulation
    if offsets_nB.ndim != 2 or offsets_nB.shape[1] != micro or split_n.shape != offsets_nB.shape[:1]:
        raise UserError(f"{path}: offsets of shape {offsets_nB.shape} do not fit microbatches of {micro} windows")
    for number, tokens in enumerate(splits):
        starts = offsets_nB[split_n == number]
        outside = starts[(starts < 0) | (starts >= len(tokens) - config.model.block_size)]
        if outside.size:
            raise UserError(f"{path}: window at offset {outside[0]} is outside the {len(tokens)} ids of split {number}")
    weights = open_safetensors(path / "init.safetensors")
    initial = StoredModel("nanogpt", config.model, NANOGPT, weights)
    params = jax.device_get(load_weights(initial))
    return Recording(config, params, splits, split_n, offsets_nB, eval_iters, last)


def config_from_recipe(o: Options, vocab_size: int) -> Config:
    """Convert a recipe with nanoGPT's names to a config.

    nanoGPT's batch_size is per microbatch, `train.batch_size` per step.

    Raises:
        UserError: if a setting is missing or invalid.
    """
    o.only("dropout", 0.0)  # no dropout masks in a recording
    accumulation = o.read("gradient_accumulation_steps", int)
    return Config(
        preset="replay",
        model=ModelConfig(
            vocab_size=vocab_size,
            block_size=o.read("block_size", int),
            n_layer=o.read("n_layer", int),
            n_head=o.read("n_head", int),
            n_embd=o.read("n_embd", int),
            bias=o.read("bias", False),
            activation="gelu",
        ),
        data=DataConfig(dataset="none", sampling="random"),
        optim=OptimConfig(
            learning_rate=o.read("learning_rate", float),
            min_lr=o.read("min_lr", float),
            schedule="cosine",
            warmup_steps=o.read("warmup_iters", int),
            decay_steps=o.read("lr_decay_iters", int),
            beta1=o.read("beta1", float),
            beta2=o.read("beta2", float),
            weight_decay=o.read("weight_decay", float),
            grad_clip=o.read("grad_clip", float),
        ),
        train=TrainConfig(
            steps=o.read("max_iters", int) + 1,
            batch_size=o.read("batch_size", int) * accumulation,
            accumulation=accumulation,
            eval_every=o.read("eval_interval", int),
        ),
    )


def replay(recording: Recording) -> Iterator[dict[str, float]]:
    """Replay a recording, and yield a row (`step`, `train`, `val`) per evaluation.

    An evaluation precedes the update of its step.

    Batches are drawn in nanoGPT's order: a training batch before the loop and a training batch after each forward pass. Each
    evaluation draws `eval_iters` training batches, then as many validation batches.
    """
    draws = _Draws(recording)
    program = build(recording.config)
    state = program.init(recording.params)
    accumulation = recording.config.train.accumulation
    batch = draws.next(TRAIN)
    for step in range(recording.last + 1):
        if step % recording.config.train.eval_every == 0:
            train = draws.mean_loss(program, state.params, TRAIN)
            yield {"step": step, "train": train, "val": draws.mean_loss(program, state.params, VAL)}
        if step == recording.last:
            return
        pieces = []
        for _ in range(accumulation):
            pieces.append(batch)
            batch = draws.next(TRAIN)
        # Row r of a batch belongs to microbatch r % accumulation.
        windows = np.stack(pieces, axis=1).reshape(-1, batch.shape[1])
        state, _ = program.step(state, program.put(windows))


class _Draws:
    """The recorded windows, in order."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.place = recording, 0

    def next(self, split: int) -> np.ndarray:
        r = self.recording
        if self.place >= len(r.split_n) or r.split_n[self.place] != split:
            raise UserError(
                f"draw {self.place} of the recording is missing or not a {('training', 'validation')[split]} batch"
            )
        starts = r.offsets_nB[self.place]
        self.place += 1
        return np.stack([r.splits[split].take(int(s), r.config.model.block_size + 1) for s in starts])

    def mean_loss(self, program: Program, params: Any, split: int) -> float:
        """Compute the mean loss over `eval_iters` draws of equal size."""
        sums = [program.sums(params, program.put(self.next(split))) for _ in range(self.recording.eval_iters)]
        pairs = [(each.loss_B, each.count_B) for each in sums]
        losses, counts = np.asarray(jax.device_get(pairs), np.float64).sum(axis=(0, 2))
        return float(losses / counts)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the losses; return the exit code, 2 for an invalid recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="the recording")
    parser.add_argument("--steps", type=int, default=0, help="steps to replay; 0: all recorded steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    use_cores(MeshConfig())
    rows = []
    try:
        for row in replay(open_recording(Path(args.directory), args.steps)):
            rows.append(row)
            if not args.json:
                print(f"step {row['step']:>5}: train {row['train']:.4f}  val {row['val']:.4f}", flush=True)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"recording": args.directory, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
