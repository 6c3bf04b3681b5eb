"""Inspect a model on one text: predictions, attention, logit lens, norms, and the loss without each head."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.decoding.sampling import DIVERGED
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import encode_prompt, start_ids
from jaxgpt.lm.text import UNFINISHED
from jaxgpt.study.heads import entropy
from jaxgpt.study.inspected_arrays import compute_arrays

INSPECTED_TOKENS = 128  # maximum number of tokens of an inspected text
TOP = 5  # maximum number of most probable tokens shown at each position


class HeadSummary(NamedTuple):
    """An attention head: its mean attention to some tokens, and its effect on the loss.

    The means are over the queries except the first, unless it is the only query.

    Attributes:
        layer: index of the layer.
        head: index of the head in the layer.
        same: mean attention to the current token.
        previous: mean attention to the previous token; 0 for a text of one token.
        first: mean attention to the first token.
        entropy: mean entropy of the attention weights, in nats.
        loss_increase: increase of the loss per token with the head ablated; None: not computed.
    """

    layer: int
    head: int
    same: float
    previous: float
    first: float
    entropy: float
    loss_increase: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the values that were computed, keyed by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Inspection(NamedTuple):
    """The predictions and activations of a model for a text of T tokens.

    Arrays of L + 1 layers contain values for the input of each block and for the output of the last block. Entropies
    and losses are in nats.
    """

    source: str  # run and step of the model (`LM.source`); empty: built in Python
    ids: list[int]  # ids of the text, `[T]`
    tokens: list[str]  # texts of the ids
    prompt: int  # number of prompt tokens, before the greedily generated tokens
    top_ids: np.ndarray  # the most probable next tokens after each token, `[T, k]`
    top_probabilities: np.ndarray  # probabilities of `top_ids`
    top_tokens: list[list[str]]  # texts of `top_ids`
    entropy: np.ndarray  # entropy of the next token after each token, `[T]`
    next_probability: np.ndarray  # probability of the actual next token, `[T - 1]`
    next_rank: np.ndarray  # rank of the actual next token, 1 for the most probable token, `[T - 1]`
    attention: np.ndarray  # attention weights of each query over the keys, `[L, N, T, T]`
    lens_tokens: list[list[str]]  # the logit lens: the most probable next token at each layer, `[L + 1][T]`
    lens_probabilities: np.ndarray  # probabilities of `lens_tokens`
    norms: np.ndarray  # Euclidean norms of the residual stream, `[L + 1, T]`
    loss_increase: np.ndarray | None  # increase of the loss with each head ablated, `[L, N]`; None: not computed

    def heads(self) -> list[HeadSummary]:
        """Summarize each head, layer by layer."""
        begin = 1 if len(self.ids) > 1 else 0  # index of the first query in the means
        same = np.diagonal(self.attention, offset=0, axis1=2, axis2=3)
        previous = np.diagonal(self.attention, offset=-1, axis1=2, axis2=3)
        entropies = np.asarray(entropy(jnp.asarray(self.attention)))
        same_LN = same[..., begin:].mean(-1)
        previous_LN = previous.mean(-1) if begin else np.zeros(same.shape[:2])
        first_LN = self.attention[:, :, begin:, 0].mean(-1)
        entropy_LN = entropies[..., begin:].mean(-1)

        summaries = []
        for layer, head in np.ndindex(same_LN.shape):
            summary = HeadSummary(
                layer=layer,
                head=head,
                same=float(same_LN[layer, head]),
                previous=float(previous_LN[layer, head]),
                first=float(first_LN[layer, head]),
                entropy=float(entropy_LN[layer, head]),
                loss_increase=None if self.loss_increase is None else float(self.loss_increase[layer, head]),
            )
            summaries.append(summary)
        return summaries

    def to_json(self) -> dict[str, Any]:
        """Return all values but the attention maps, which are summarized by `heads`."""
        values = self._asdict()
        del values["attention"]
        arrays = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
        return values | arrays | {"heads": [head.to_json() for head in self.heads()]}


def inspect(lm: LM, prompt: str, *, max_new_tokens: int = 20) -> Inspection:
    """Continue a prompt greedily, and inspect the model on the whole text.

    Args:
        prompt: the text to continue; empty: start a new text.
        max_new_tokens: maximum number of new tokens (greedy decoding); 0: inspect the prompt alone.

    Raises:
        UserError: as in `generate`, or if the prompt and `max_new_tokens` exceed 128 tokens or the context length, or the
            weights have diverged.
    """
    text = _continued(lm, prompt, max_new_tokens)
    ids = text.ids
    found = compute_arrays(lm, ids, _limit(lm))
    log_p_TV = found.log_p_PV
    if np.isnan(log_p_TV).any():
        raise UserError(DIVERGED)

    p_TV = np.exp(log_p_TV)
    k = min(TOP, int(np.isfinite(log_p_TV[0]).sum()))  # ids without a text have probability 0
    best_Tk = np.argsort(-log_p_TV, axis=-1, kind="stable")[:, :k]
    next_log_p = log_p_TV[np.arange(len(ids) - 1), ids[1:]]

    word = partial(token_text, lm.tokenizer, first=ids[0])
    return Inspection(
        source=lm.source,
        ids=ids,
        tokens=[token_text(lm.tokenizer, ids[0]), *map(word, ids[1:])],
        prompt=text.n_prompt,
        top_ids=best_Tk,
        top_probabilities=np.take_along_axis(p_TV, best_Tk, -1),
        top_tokens=[[word(i) for i in row] for row in best_Tk.tolist()],
        entropy=-(p_TV * np.where(p_TV > 0, log_p_TV, 0.0)).sum(-1),
        next_probability=np.exp(next_log_p),
        next_rank=1 + (log_p_TV[:-1] > next_log_p[:, None]).sum(-1),
        attention=found.attention_LNPP,
        lens_tokens=[[word(i) for i in row] for row in found.lens_LP.tolist()],
        lens_probabilities=found.lens_p_LP,
        norms=np.linalg.norm(found.stream_LPD.astype(np.float64), axis=-1),
        loss_increase=found.loss_increase_LN,
    )


def _limit(lm: LM) -> int:
    """Return the maximum number of tokens of an inspected text."""
    return min(INSPECTED_TOKENS, lm.config.model.block_size)


class _ContinuedPrompt(NamedTuple):
    """The ids of a prompt and its continuation, and the number of ids of the prompt."""

    ids: list[int]
    n_prompt: int


def _continued(lm: LM, prompt: str, max_new_tokens: int) -> _ContinuedPrompt:
    """Continue a prompt by greedy decoding."""
    ids = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt) or start_ids(lm.tokenizer)
    n_prompt = len(ids)
    if n_prompt + max_new_tokens > _limit(lm):
        raise UserError(
            f"a prompt of {n_prompt} tokens and {max_new_tokens} new tokens exceed the limit of {_limit(lm)}: shorten the "
            f"prompt, or lower max_new_tokens"
        )
    if max_new_tokens:
        [continuation] = generate(lm, [ids], max_new_tokens=max_new_tokens, temperature=0)
        ids = ids + continuation.ids
    return _ContinuedPrompt(ids, n_prompt)


def token_text(tokenizer: Tokenizer, i: int, first: int | None = None) -> str:
    """Return the text of a token, or the names of its bytes if they are not complete characters.

    With `first`, the token is decoded after this id, because some decoders strip a leading space.
    """
    text = tokenizer.decode([i])
    if first is not None and not tokenizer.separator:
        before = tokenizer.decode([first])
        both = tokenizer.decode([first, i])
        if both.startswith(before):
            text = both[len(before) :]
    return tokenizer.name(i) if UNFINISHED in text else text
