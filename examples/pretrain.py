"""Train a small model from scratch; data, model, loss, optimizer and listener can be replaced.

python examples/pretrain.py [TEXT] [--steps 200] [--out runs/example]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.data import open_data
from jaxgpt.errors import UserError
from jaxgpt.kernels import best
from jaxgpt.model import GPT
from jaxgpt.train.loss import RowSums, cross_entropy, split_windows
from jaxgpt.trainer.build import build
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import Outcome, Start, train
from jaxgpt.trainer.mean_loss import Evaluation


class Lines(Listener):
    """Print a line for every tenth step and every evaluation. A tracker overrides the same methods."""

    def progress(self, metrics: dict[str, float]) -> None:
        if metrics["step"] % 10 == 0:
            print(f"step {metrics['step']:4.0f}  loss {metrics['loss']:.3f}  gradient norm {metrics['grad_norm']:.2f}")

    def evaluated(self, step: int, result: Evaluation) -> None:
        print(f"step {step:4}  validation loss {result}")


def main(text: str, steps: int, out: str) -> Outcome:
    config = Config(
        preset="example",
        data=DataConfig(path=text),  # empty: the built-in dataset
        model=ModelConfig(block_size=64, n_layer=2, n_head=2, n_embd=64, positions="rope", norm="rmsnorm", bias=False),
        train=TrainConfig(steps=steps, batch_size=16, eval_every=50, eval_windows=64),
    )
    data = open_data(config)  # or a custom `Data`, with the protocol `jaxgpt.data.Split` for `train` and `val`
    config = config.with_model(vocab_size=data.tokenizer.vocab_size)

    model = GPT(config.model, best(config))  # or a subclass, with custom operations

    def objective(params: Any, windows_BT1: jax.Array, key: jax.Array | None, frozen: Any) -> RowSums:
        """Compute cross entropy plus PaLM's z-loss, which keeps the normalizer of the softmax near 1."""
        inputs_BT, targets_BT, _ = split_windows(windows_BT1)
        logits_BTV = model.apply({"params": params}, inputs_BT, key)
        z_BT = 1e-4 * jnp.where(targets_BT < 0, 0.0, jax.nn.logsumexp(logits_BTV, axis=-1) ** 2)
        count_B = (targets_BT >= 0).sum(-1, dtype=jnp.float32)
        return RowSums((cross_entropy(logits_BTV, targets_BT) + z_BT).sum(-1), count_B, {"z": z_BT.sum(-1)})

    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=20, decay_steps=max(steps, 21))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(rate, weight_decay=0.1))

    parts = partial(build, model=model, objective=objective, optimizer=optimizer)
    return train(Start(config, out=out, data=data, build=parts), Lines())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="")
    try:
        main(**vars(parser.parse_args()))
    except UserError as e:
        parser.error(str(e))
