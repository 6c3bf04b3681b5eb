"""How one token came to be chosen."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxgpt.decoding import History, Policy
from jaxgpt.decoding.explain import Choice
from jaxgpt.decoding.explain import explain as explain_choice
from jaxgpt.lm.model import LM, functions_of, placed
from jaxgpt.prompts import encode_rows


def explain(lm: LM, prompt: str | Sequence[int], policy: Policy, key: jax.Array) -> Choice:
    """How the token after a prompt is chosen: every rule's effect, the random number, the token.

    Args:
        lm: the model.
        prompt: string, or ids.
        policy: the rules.
        key: of the row; `generate` gives row i `jax.random.fold_in(its key, i)`.

    Raises:
        UserError: no ids for the prompt, or more than the context holds.
    """
    [ids], _ = encode_rows(lm.tokenizer, lm.config.model, [prompt], 1, None)
    model = functions_of(lm)
    history = History(jnp.array([ids], jnp.int32), jnp.zeros((1,), jnp.int32), jnp.int32(len(ids)))
    with placed(lm):
        logits_11V, _ = model.extend(lm.params, history.ids_BS, model.cache(history.start_B, len(ids)), True)
    return explain_choice(logits_11V[:, -1], history, policy, key)
