"""jaxgpt explain RUN --prompt TEXT"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxgpt.cli.console import progress
from jaxgpt.cli.options import NO_SAMPLING, Checkpoint, Count, GivenSampling, Json, Seed, Special, Weights
from jaxgpt.cli.output import print_result
from jaxgpt.cli.sampling_note import note_sampling
from jaxgpt.config import SamplingParams
from jaxgpt.options import SEED

if TYPE_CHECKING:
    import numpy as np

    from jaxgpt.data.tokenizers.base import Tokenizer
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
    new_text = ""  # an empty list of ids is not a prompt
    choice = explain_token(lm, ids or new_text, key=seed, **sampling)

    probability_V = choice.probability_V
    most_probable = np.argsort(-probability_V, kind="stable")[:show]
    top = [_token(lm.tokenizer, ids, int(i), probability_V) for i in most_probable if probability_V[i] > 0]
    chosen = _token(lm.tokenizer, ids, choice.token, probability_V)
    values = {
        "run": run,
        "prompt": prompt,
        "key": choice.key,
        "total": float(probability_V.sum()),
        "stages": [stage._asdict() for stage in choice.stages],
        "candidates": [token._asdict() for token in top],
        "uniform": choice.uniform,
        "before": choice.before,
        "token": chosen._asdict(),
    }
    return print_result(json, values, "\n".join(_lines(choice, top, chosen)))


class Token(NamedTuple):
    """A token that may follow the prompt: its id, its text after the prompt, and its probability after all filters."""

    id: int
    text: str
    probability: float


def _token(tokenizer: Tokenizer, prompt: list[int], id: int, probability_V: np.ndarray) -> Token:
    """Describe a token that may follow a prompt."""
    from jaxgpt.lm.text import TextStream

    text = TextStream(tokenizer, 1, prompt=prompt).add([id])
    return Token(id, text, float(probability_V[id]))


def _lines(choice: Choice, top: Sequence[Token], chosen: Token) -> Iterator[str]:
    """Yield the lines of an explanation: the stages, the most probable tokens and the chosen token."""
    yield f"vocabulary     {len(choice.probability_V):,} tokens"
    for stage in choice.stages:
        effects = []
        if stage.removed:
            effects.append(f"removed {stage.removed:,} tokens ({stage.removed_mass:.2%} of the probability mass)")
        if stage.moved_mass > 5e-7:  # above rounding errors
            effects.append(f"shifted {stage.moved_mass:.2%} of the probability mass")
        yield f"{stage.name:22} {', '.join(effects) or 'no change'}; {stage.left:,} left"

    for token in top:
        yield f"  {token.probability:.6f}  {token.text!r} ({token.id})"

    if choice.uniform is None:
        yield f"chosen         {chosen.text!r} ({chosen.id}), the most probable"
        return
    yield f"random number  {choice.uniform:.8f}"
    end = choice.before + chosen.probability
    span = f"cumulative probability {choice.before:.8f} to {end:.8f}, in order of id"
    yield f"sampled        {chosen.text!r} ({chosen.id}): {span}"
