"""jaxgpt explain RUN --prompt TEXT"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.options import NO_SAMPLING, Checkpoint, Count, GivenSampling, Json, Seed, Special, Weights
from jaxgpt.cli.output import note_sampling, print_result, progress
from jaxgpt.config import SamplingParams
from jaxgpt.options import SEED

if TYPE_CHECKING:
    import numpy as np

    from jaxgpt.data.tokenizer import Tokenizer
    from jaxgpt.lm.explain import Choice


def explain(
    run: str,
    /,
    *,
    prompt: str = "",
    special: Special = False,
    seed: Seed = SEED,
    show: Count = 10,
    weights: Weights = "float32",
    checkpoint: Checkpoint = "best",
    json: Json = False,
    sampling: GivenSampling = NO_SAMPLING,
) -> int:
    """Show how the next token is sampled: the effect of each filter, and the random number.

    jaxgpt explain runs/shakespeare --prompt ROMEO:
    jaxgpt explain runs/shakespeare --prompt ROMEO: --top-k 5 --temperature 0.5
    jaxgpt explain runs/shakespeare --prompt ROMEO: --top-p 0.9 --show 20 --json

    Args:
        run: run with the model
        prompt: text to continue; empty: start a new text
        show: maximum number of most probable tokens to list
    """
    SamplingParams(**sampling)  # check the values before the model is read
    import numpy as np

    from jaxgpt.lm import explain as explain_token
    from jaxgpt.lm import load
    from jaxgpt.lm.arguments import encode_prompt

    with progress("loading"):
        lm = load(run, checkpoint, weights)
    ids = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt, special)
    note_sampling(lm, sampling)
    choice = explain_token(lm, ids or "", key=seed, **sampling)

    probability_V = choice.probability_V
    top = [int(i) for i in np.argsort(-probability_V, kind="stable")[:show] if probability_V[i] > 0]
    candidates = [_candidate(lm.tokenizer, ids, i, probability_V) for i in top]
    token = _candidate(lm.tokenizer, ids, choice.token, probability_V)
    values = {
        "run": run,
        "prompt": prompt,
        "key": choice.key,
        "total": float(probability_V.sum()),
        "stages": [stage._asdict() for stage in choice.stages],
        "candidates": candidates,
        "uniform": choice.uniform,
        "before": choice.before,
        "token": token,
    }
    return print_result(json, values, "\n".join(_lines(choice, candidates, token)))


def _candidate(tokenizer: Tokenizer, prompt: list[int], token: int, probability_V: np.ndarray) -> dict[str, Any]:
    """Return the id, the text after a prompt, and the probability of a token."""
    from jaxgpt.lm.text import TextStream

    text = TextStream(tokenizer, 1, prompt=prompt).add([token])
    return {"id": token, "text": text, "probability": float(probability_V[token])}


def _lines(choice: Choice, candidates: list[dict[str, Any]], token: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of an explanation: the stages, the candidates and the choice."""
    yield f"vocabulary     {len(choice.probability_V):,} tokens"
    for stage in choice.stages:
        effects = []
        if stage.removed:
            effects.append(f"removed {stage.removed:,} tokens ({stage.removed_mass:.2%} of the probability mass)")
        if stage.moved_mass > 5e-7:
            effects.append(f"shifted {stage.moved_mass:.2%} of the probability mass")
        yield f"{stage.name:22} {', '.join(effects) or 'no change'}; {stage.left:,} left"

    for one in candidates:
        yield f"  {one['probability']:.6f}  {one['text']!r} ({one['id']})"

    if choice.uniform is None:
        yield f"chosen         {token['text']!r} ({token['id']}), the most probable"
        return
    yield f"random number  {choice.uniform:.8f}"
    end = choice.before + token["probability"]
    span = f"cumulative probability {choice.before:.8f} to {end:.8f}, in order of id"
    yield f"sampled        {token['text']!r} ({token['id']}): {span}"
