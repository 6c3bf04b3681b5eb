"""jaxgpt explain RUN --prompt TEXT"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.cli.sample import check_seed, say_where_it_begins
from jaxgpt.config import MeshConfig, UserError

COMMAND = Command(
    "explain",
    "RUN",
    "Show how the next token is sampled: what each filter removes, the candidates left, and the random number that decides.",
    [
        "jaxgpt explain runs/shakespeare --prompt ROMEO:",
        "jaxgpt explain runs/shakespeare --prompt ROMEO: --top-k 5 --temperature 0.5",
        "jaxgpt explain runs/shakespeare --prompt ROMEO: --top-p 0.9 --show 20 --json",
    ],
)


@dataclass(frozen=True)
class Args:
    prompt: str = ""  # what the text begins with; empty: from the start of a text
    temperature: float = 0.8  # logits are divided by it; 0: always the likeliest
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together reach this probability; 1: all
    min_p: float = 0.0  # only what is at least so many times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # what was said before is made less likely by it; 1: off
    no_repeat_ngram_size: int = 0  # so many tokens in a row never come twice; 0: off
    seed: int = 1337  # of the draw
    key: tuple[int, ...] = ()  # instead of a seed: a key that was printed
    show: int = 10  # so many of the likeliest candidates are listed
    weights: Literal["float32", "bfloat16", "int8"] = "float32"  # precision in which the weights are kept
    checkpoint: str = "best"  # best (lowest validation loss), last, or a step
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)
    check_seed(parsed.seed)
    if parsed.show < 0:
        raise UserError(f"show must be at least 0, not {parsed.show}")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    import jax
    import numpy as np

    from jaxgpt.decoding import Policy
    from jaxgpt.lm import explain, load

    policy = Policy(
        parsed.temperature,
        parsed.top_k,
        parsed.top_p,
        parsed.min_p,
        parsed.repetition_penalty,
        parsed.no_repeat_ngram_size,
    )
    lm = load(target, parsed.checkpoint, parsed.weights)
    say_where_it_begins(lm.tokenizer, [parsed.prompt])
    if parsed.key:
        words = jax.random.key_data(jax.random.key(0)).size
        if len(parsed.key) != words or not all(0 <= word < 2**32 for word in parsed.key):
            raise UserError(f"key must be {words} numbers from 0 to {2**32 - 1}, as they were printed")
        key = jax.random.wrap_key_data(jax.numpy.array(parsed.key, jax.numpy.uint32))
    else:
        # The key of the first row of `sample` with the same seed.
        key = jax.random.fold_in(jax.random.key(parsed.seed), 0)
    choice = explain(lm, parsed.prompt, policy, key)

    likeliest = np.argsort(-choice.probability_V, kind="stable")[: parsed.show]
    candidates = [
        {"id": int(i), "text": lm.tokenizer.decode([int(i)]), "probability": float(choice.probability_V[i])}
        for i in likeliest
        if choice.probability_V[i] > 0
    ]
    token = {
        "id": choice.token,
        "text": lm.tokenizer.decode([choice.token]),
        "probability": float(choice.probability_V[choice.token]),
    }
    if parsed.json:
        figures = {
            "run": target,
            "prompt": parsed.prompt,
            "key": choice.key,
            "stages": [stage._asdict() for stage in choice.stages],
            "candidates": candidates,
            "uniform": choice.uniform,
            "before": choice.before,
            "token": token,
            "total": float(choice.probability_V.sum()),
        }
        print_json(figures)
        return 0
    print(f"candidates     {len(choice.probability_V):,} ids, probability 1 in all")
    for stage in choice.stages:
        gone = f"removed {stage.removed:,} with {stage.removed_mass:.6f} of the probability" if stage.removed else ""
        moved = f"moved {stage.moved_mass:.6f} between the others" if stage.moved_mass > 5e-7 else ""
        effect = ", ".join(filter(None, (gone, moved))) or "changed nothing"
        print(f"{stage.name:22} {effect}; {stage.left:,} left")
    for one in candidates:
        print(f"  {one['probability']:.6f}  {one['text']!r} ({one['id']})")
    if choice.uniform is None:
        print(f"chosen         {token['text']!r} ({token['id']}), the likeliest")
        return 0
    key_words = " ".join(map(str, choice.key))
    print(f"random number  {choice.uniform:.8f} (again: --key {key_words})")
    end = choice.before + float(choice.probability_V[choice.token])
    print(
        f"chosen         {token['text']!r} ({token['id']}): in the order of ids it covers {choice.before:.8f} to {end:.8f}"
    )
    return 0
