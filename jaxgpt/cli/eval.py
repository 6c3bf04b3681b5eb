"""jaxgpt eval RUN [--data.path FILE]"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from jaxgpt.cli.output import ERROR_OF_DATA, print_result, progress
from jaxgpt.cli.parse import Checkpoint, Json, Weights
from jaxgpt.config import MeshConfig
from jaxgpt.errors import UserError, plural


def eval(
    run: str,
    /,
    *,
    path: Annotated[str, Parameter(name="--data.path")] = "",
    bos: Annotated[Literal["auto", "yes", "no"] | None, Parameter(name="--data.bos")] = None,
    on_error: Annotated[Literal["fail", "skip"] | None, Parameter(name="--data.on-error")] = None,
    weights: Annotated[
        Weights, Parameter(help="round the weights to this type and print the change in loss")
    ] = "float32",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> int:
    """Compute the loss of a run on its validation split or a different text, with a standard error.

    jaxgpt eval runs/shakespeare
    jaxgpt eval runs/shakespeare --data.path other.txt
    jaxgpt eval runs/shakespeare --weights int8  # the change in loss from int8 weights

    Args:
        run: run to evaluate
        path: text, directory, token files or conversations; empty: the run's validation data or, without a split, training data
        bos: begin each window of a text with the beginning-of-text token; by default, as in training
        on_error: on unreadable conversations: fail, or skip and count them; by default, as in training
    """
    from jaxgpt.parallel.host import use_cores

    use_cores(MeshConfig())
    from jaxgpt.checkpoint.data import info_of, open_run_data
    from jaxgpt.checkpoint.run import Run, open_run
    from jaxgpt.data import with_path
    from jaxgpt.data.open import check_sources
    from jaxgpt.lm import load
    from jaxgpt.lm.weights import dequantize, quantize
    from jaxgpt.report.baselines import bytes_per_token
    from jaxgpt.trainer.evaluation import evaluate, loss_difference
    from jaxgpt.trainer.program import build

    with progress("loading") as activity:
        if path:
            given = with_path(open_run(Path(run)).config(), path)
            if on_error:
                given = replace(given, data=replace(given.data, on_error=on_error))
            check_sources(given)
        lm = load(run, checkpoint)
        activity.stage("tokenizing")
        config = with_path(lm.config, path)
        if bos:
            config = replace(config, data=replace(config.data, bos=bos))
        if on_error:
            config = replace(config, data=replace(config.data, on_error=on_error))
        trained = None if path else Run(Path(run))
        info = info_of(trained, checkpoint) if trained else None
        _, data, change = open_run_data(trained, info, config, lm.tokenizer, activity)
        if change:
            fix = "restore it, or evaluate on a different text with --data.path"
            raise UserError(f"{change}, so a loss on it would not be a validation loss; {fix}")
        activity.stage("evaluating")
        # The run's mesh, attention kernel and rematerialization may need hardware that this machine lacks.
        train = replace(lm.config.train, attention="auto", remat="none")
        program = build(replace(lm.config, mesh=MeshConfig(), train=train))
        result = evaluate(program, program.put_params(lm.params), data.val, progress=activity)
        assert result is not None  # None: interrupted, which cannot happen here
        cost: dict[str, float] = {}
        change = ""
        if weights != "float32":
            activity.stage(f"evaluating {weights}")
            lower = program.put_params(dequantize(quantize(lm.params, lm.config.model, weights)))
            full, result = result, evaluate(program, lower, data.val, progress=activity)
            assert result is not None
            difference, stderr = loss_difference(full, result)
            cost = {"loss_float32": full.loss, "loss_change": difference, "loss_change_stderr": stderr}
            error = f" +- {stderr:.5f}" if math.isfinite(stderr) else ""
            change = f"changes the loss by {difference:+.5f}{error}, from {full.loss:.4f}"
    split = "validation split" if data.held_out else "all" if path else "training text"
    text, ratio = f"{data.source} ({split})", bytes_per_token(data)
    results = {
        "run": run,
        "model": lm.source,
        "text": text,
        "weights": weights,
        "loss": result.loss,
        "stderr": result.stderr,
        **cost,
        "perplexity": math.exp(min(result.loss, 700.0)),
        "bits_per_byte": result.loss / math.log(2) / ratio if ratio else math.nan,
        "tokens": result.tokens,
        "windows": result.windows,
    }
    facts = {
        "model": lm.source,
        "text": text,
        "loss": [f"{result} nats per token", ERROR_OF_DATA if math.isfinite(result.stderr) else ""],
        weights: change,
        "perplexity": f"{results['perplexity']:.3f}",
        "bits per byte": f"{results['bits_per_byte']:.4f}" if ratio else "",
        "tokens": f"{result.tokens:,} in {plural(result.windows, 'window')} of {lm.config.window}",
    }
    return print_result(json, {k: v for k, v in results.items() if not isinstance(v, float) or math.isfinite(v)}, facts)
