"""jaxgpt eval RUN [--data.path FILE]"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.cli.progress import progress
from jaxgpt.config import Config, MeshConfig, UserError

if TYPE_CHECKING:
    from jaxgpt.trainer.program import Program

COMMAND = Command(
    "eval",
    "RUN",
    "Compute the loss of a run, with its standard error, on the whole validation split or on another text.",
    [
        "jaxgpt eval runs/shakespeare",
        "jaxgpt eval runs/shakespeare --data.path other.txt",
        "jaxgpt eval runs/shakespeare --weights int8  # the change in loss from int8 weights",
    ],
)


@dataclass(frozen=True)
class DataArgs:
    """Text to evaluate on."""

    path: str = ""  # text, folder, token files or conversations to evaluate on; empty: the validation split of the run


@dataclass(frozen=True)
class Args:
    data: DataArgs = field(default_factory=DataArgs)
    # round the weights to this type and print the change in loss
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    checkpoint: str = "best"  # checkpoint to load: best (lowest validation loss), last, or a step
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig())
    from jaxgpt.data import open_data, with_path
    from jaxgpt.lm import load
    from jaxgpt.ops.quantize import dequantize, quantize
    from jaxgpt.trainer.evaluation import evaluate, loss_difference

    with progress("loading") as activity:
        lm = load(target, parsed.checkpoint)
        activity.stage("tokenizing")
        data = open_data(with_path(lm.config, parsed.data.path), lm.tokenizer, activity)
        activity.stage("evaluating")
        program = _program(lm.config)
        result = evaluate(program, program.put_params(lm.params), data.val, progress=activity)
        assert result is not None  # None means interrupted, which cannot happen here
        cost: dict[str, float] = {}
        if parsed.weights != "float32":
            activity.stage(f"evaluating {parsed.weights}")
            lower = program.put_params(dequantize(quantize(lm.params, parsed.weights)))
            full, result = result, evaluate(program, lower, data.val, progress=activity)
            assert result is not None
            difference, stderr = loss_difference(full, result)
            cost = {"loss_float32": full.loss, "loss_change": difference, "loss_change_stderr": stderr}
    size = data.val_bytes()
    bits = result.loss / math.log(2) * len(data.val) / size if size else math.nan
    split = "validation split" if data.held_out else "all" if parsed.data.path else "training text"
    text = f"{data.source} ({split})"
    results = {
        "run": target,
        "text": text,
        "weights": parsed.weights,
        "loss": result.loss,
        "stderr": result.stderr,
        **cost,
        "perplexity": math.exp(min(result.loss, 700.0)),
        "bits_per_byte": bits,
        "tokens": result.tokens,
        "windows": result.windows,
    }
    if parsed.json:
        print_json({k: v for k, v in results.items() if not isinstance(v, float) or math.isfinite(v)})
        return 0
    print(f"text           {text}")
    print(f"loss           {result} nats per token")
    if cost:
        error = f" +- {cost['loss_change_stderr']:.5f}" if math.isfinite(cost["loss_change_stderr"]) else ""
        print(
            f"{parsed.weights:14} changes the loss by {cost['loss_change']:+.5f}{error}, from {cost['loss_float32']:.4f}"
        )
    print(f"perplexity     {results['perplexity']:.3f}")
    if size:
        print(f"bits per byte  {bits:.4f}")
    plural = "s" * (result.windows > 1)
    print(f"tokens         {result.tokens:,} in {result.windows:,} window{plural} of {lm.config.model.block_size}")
    return 0


def _program(config: Config) -> Program:
    """Build the program of a run for this machine, with the run's mesh and attention kernel if this machine supports them."""
    from jaxgpt.trainer.program import build

    fitting = replace(config, train=replace(config.train, attention="auto", remat="none"))
    for own in (config, fitting):
        with suppress(UserError):
            return build(own)
    return build(replace(fitting, mesh=MeshConfig()))
