"""Fine-tune a run with LoRA adapters on a text; data, optimizer and listener can be replaced.

python examples/finetune.py RUN TEXT [--steps 50] [--out runs/tuned]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import optax

import jaxgpt
from jaxgpt.checkpoint.index import weights_at
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import DataConfig, LoraConfig, OptimConfig, TrainConfig
from jaxgpt.data import Data, open_data
from jaxgpt.errors import UserError
from jaxgpt.trainer.build import build
from jaxgpt.trainer.evaluation import evaluate
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import Outcome, Start, train
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program


class Losses(Listener):
    """Collect and print the validation losses by step, starting with the loss of the base model."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        base = evaluate(program, program.init().params, data.val)  # adapters without effect before the first step
        assert base is not None
        self.evaluated(0, base)

    def evaluated(self, step: int, result: Evaluation) -> None:
        self.by_step[step] = result.loss
        print(f"step {step:4}  validation loss {result}")


def main(run: str, text: str, steps: int, out: str) -> tuple[Outcome, Losses]:
    base = jaxgpt.load(run)
    config = replace(
        base.config,
        preset="example",
        init_from=str(weights_at(run).absolute()),
        data=DataConfig(path=text, tokenizer=str(Path(run, "tokenizer.json").absolute())),
        lora=LoraConfig(rank=4, targets="q_proj,v_proj"),
        optim=OptimConfig(),  # defaults instead of the base's settings: Muon does not support adapters
        train=TrainConfig(steps=steps, batch_size=8, eval_every=25),
    )
    data = open_data(config, base.tokenizer)
    optimizer = optax.adam(optax.linear_schedule(1e-2, 0.0, steps))
    losses = Losses()
    return train(Start(config, out=out, data=data, build=partial(build, optimizer=optimizer)), losses), losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("text")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="")
    try:
        main(**vars(parser.parse_args()))
    except UserError as e:
        parser.error(str(e))
