"""Requests of tasks for log probabilities: of choices and of complete texts.

The definitions are the same as in lm-evaluation-harness for causal models; this module does not import the harness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxgpt.errors import UserError
from jaxgpt.lm import LM, score
from jaxgpt.lm.arguments import start_ids
from jaxgpt.parallel.processes import process_count, same_on_all

Count = Callable[[int, int], None]  # called with the number of finished requests so far, and the total


def no_count(done: int, total: int) -> None:
    """Ignore the progress."""


class Continuation(NamedTuple):
    """A continuation with a probability that a task compares: its ids, and the ids of its context."""

    context: list[int]
    ids: list[int]


def encode(lm: LM, text: str, with_start: bool = True) -> list[int]:
    """Encode a text; names of special tokens become their ids, as in transformers.

    With `with_start`, the ids begin with the tokenizer's beginning-of-text ids.
    """
    ids: list[int] = lm.tokenizer.encode_special(text).tolist()
    return lm.tokenizer.after_bos(ids) if with_start else ids


def prefix_id(lm: LM) -> int:
    """Return the id before a text without context."""
    return start_ids(lm.tokenizer)[0]


def answer_choices(lm: LM, choices: Sequence[Continuation], count: Count = no_count) -> list[tuple[float, bool]]:
    """Return the log probability of each choice in nats, and whether greedy decoding would produce it.

    A context that does not fit the context length with its choice loses its beginning.

    Raises:
        UserError: if a choice is empty or longer than the context length.
    """
    check_same(choices)
    context_length = lm.config.model.block_size
    contexts = []
    for choice in choices:
        if len(choice.ids) > context_length:
            raise UserError(
                f"a choice of the task has {len(choice.ids)} tokens, and the model's context is {context_length}: choose a "
                f"task with shorter texts"
            )
        kept = context_length + 1 - len(choice.ids)
        contexts.append(choice.context[-kept:])
    scores = score(lm, contexts, [choice.ids for choice in choices], progress=count)
    return [(float(each.log_p.sum(dtype="float64")), bool(each.is_best.all())) for each in scores]


def check_same(requests: Sequence[Any]) -> None:
    """Raise `UserError` if the processes of a run have different requests, which they could not answer together."""
    if process_count() > 1:
        digest = hashlib.sha256(repr(list(requests)).encode()).hexdigest()
        same_on_all(lambda: digest, lambda digest: {"the digest of the requests of a task": digest[:8]})


def windows(ids: list[int], start: int, length: int) -> list[Continuation]:
    """Split a text into windows that predict each of its ids once.

    A window has at most `length` inputs. The first window begins with the id `start`. Each later window begins with the last
    input of the previous window; the last window has as many earlier ids as fit.
    """
    sequence = [start, *ids]
    found = []
    for begin in range(0, len(ids), length):
        end = min(begin + length, len(ids))
        first = max(end - length, 0)
        found.append(Continuation(sequence[first : begin + 1], ids[begin:end]))
    return found


def answer_texts(lm: LM, texts: Sequence[list[int]], count: Count = no_count) -> list[float]:
    """Return the log probability of each complete text, in nats; long texts are split into `windows`."""
    start = prefix_id(lm)
    choices: list[Continuation] = []
    owners: list[int] = []
    for owner, ids in enumerate(texts):
        parts = windows(ids, start, lm.config.model.block_size)
        choices += parts
        owners += [owner] * len(parts)

    totals = [0.0] * len(texts)
    for owner, (log_p, _) in zip(owners, answer_choices(lm, choices, count), strict=True):
        totals[owner] += log_p
    return totals
