"""jaxgpt eval RUN [--data.path FILE]"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.config import MeshConfig, UserError

COMMAND = Command(
    "eval",
    "RUN",
    "Compute the loss of a run on its whole validation split, or on another text, with its standard error.",
    [
        "jaxgpt eval runs/shakespeare",
        "jaxgpt eval runs/shakespeare --data.path other.txt",
        "jaxgpt eval runs/shakespeare --weights int8  # what quantization costs",
    ],
)


@dataclass(frozen=True)
class DataArgs:
    """Data."""

    path: str = ""  # evaluate on all of this text; empty: the validation split of the run


@dataclass(frozen=True)
class Args:
    data: DataArgs = field(default_factory=DataArgs)
    # round the weights to this type, and print the change in loss
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    checkpoint: str = "best"  # checkpoint to load: best (lowest validation loss), last, or a step
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig())
    from jaxgpt.data import load_dataset
    from jaxgpt.lm import load
    from jaxgpt.ops.quantize import fake_quantize
    from jaxgpt.train.build import build
    from jaxgpt.train.evaluate import evaluate

    lm = load(target, parsed.checkpoint)
    config = lm.config
    if parsed.data.path:
        if not Path(parsed.data.path).exists():
            raise UserError(f"no such file or folder: {parsed.data.path}")
        # Nothing is trained on here: the whole of it counts.
        config = replace(config, data=replace(config.data, path=parsed.data.path, train_fraction=1.0))
    data = load_dataset(config, lm.tokenizer)
    program = build(config)
    result = evaluate(program, program.place(lm.params), data.val)
    assert result is not None  # nobody interrupts here
    change: dict[str, float] = {}
    if parsed.weights != "float32":
        full, result = result, evaluate(program, program.place(fake_quantize(lm.params, parsed.weights)), data.val)
        assert result is not None
        change = {"loss_float32": full.loss, "loss_change": result.loss - full.loss}
    text_bytes = len(lm.tokenizer.decode(data.val.take(0, len(data.val))).encode())
    bits = result.loss / math.log(2) * len(data.val) / text_bytes
    figures = {
        "run": target,
        "text": data.source,
        "weights": parsed.weights,
        "loss": result.loss,
        "stderr": result.stderr,
        **change,
        "perplexity": math.exp(min(result.loss, 700.0)),
        "bits_per_byte": bits,
        "tokens": result.tokens,
        "windows": result.windows,
    }
    if parsed.json:
        print_json({k: v for k, v in figures.items() if not isinstance(v, float) or math.isfinite(v)})
        return 0
    split = "all" if parsed.data.path else ("its validation split" if data.held_out else "its training text")
    print(f"text           {data.source} ({split})")
    print(f"loss           {result.loss:.4f} +- {result.stderr:.4f} nats per token")
    if change:
        print(
            f"{parsed.weights:14} changes the loss by {change['loss_change']:+.5f}, from {change['loss_float32']:.4f}"
        )
    print(f"perplexity     {figures['perplexity']:.3f}")
    print(f"bits per byte  {bits:.4f}")
    print(f"tokens         {result.tokens:,} in {result.windows:,} windows of {config.model.block_size}")
    return 0
