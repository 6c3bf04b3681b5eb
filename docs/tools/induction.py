"""Plot a run of the preset `induction`: the loss, and scores of heads at each checkpoint.

python train.py induction && python docs/tools/induction.py runs/induction docs/img/induction.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

import jaxgpt
from jaxgpt import study

matplotlib.use("Agg")
from matplotlib import pyplot

STEPS = range(50, 1001, 50)


def main(run: str, picture: str) -> None:
    """Score the heads on repeated random tokens, and plot the losses and scores of a run to a file."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    losses = np.array([(line["step"], line["loss"]) for line in lines if "loss" in line])
    models = [jaxgpt.load(run, step) for step in STEPS]
    ids = study.repeated_tokens(models[0], period=25, rows=32)
    scores = [study.heads(lm, ids) for lm in models]
    previous = np.stack([score.previous for score in scores]).astype(float)
    induction = np.stack([score.induction for score in scores]).astype(float)

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 6), constrained_layout=True)
    above.plot(*losses.T, color="black", linewidth=1)
    above.set(ylabel="training loss (nats per token)")
    for layer, head in np.ndindex(induction.shape[1:]):
        name = f"layer {layer} head {head}"
        if layer == 0 and previous[-1, layer, head] == previous[-1].max():
            below.plot(STEPS, previous[:, layer, head], "--", label=f"{name}: attention to the previous token")
        if layer == 1:
            below.plot(STEPS, induction[:, layer, head], label=f"{name}: induction score")
    below.set(xlabel="step", ylabel="mean attention", ylim=(0, 1))
    below.legend(fontsize="small")
    figure.savefig(picture, dpi=110)
    layer, head = np.unravel_index(induction[-1].argmax(), induction.shape[1:])
    print(f"induction scores of layer {layer} head {head} by step: {induction[:, layer, head].round(2).tolist()}")
    print(f"scores at step {STEPS[-1]}: induction\n{induction[-1].round(2)}\nprevious token\n{previous[-1].round(2)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
