"""Compute the log probabilities that tasks request: of each choice, and of complete texts.

The definitions are the same as in lm-evaluation-harness for causal models; this module does not import the harness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxgpt.errors import UserError
from jaxgpt.lm import LM, score
from jaxgpt.lm.arguments import start_ids
from jaxgpt.parallel.processes import process_count, same_on_all
from jaxgpt.progress import NO_PROGRESS, Progress


class Continuation(NamedTuple):
    """A continuation, such as a choice of a task, as ids, and the ids of its context."""

    context: list[int]
    ids: list[int]


def encode(lm: LM, text: str, with_start: bool = True) -> list[int]:
    """Encode a text; names of special tokens become their ids, as in transformers.

    With `with_start`, the ids begin with the tokenizer's beginning-of-text ids.
    """
    ids: list[int] = lm.tokenizer.encode_special(text).tolist()
    return lm.tokenizer.after_bos(ids) if with_start else ids


def prefix_id(lm: LM) -> int:
    """Return the id that the model reads before a text without context."""
    return start_ids(lm.tokenizer)[0]


def answer_choices(
    lm: LM, choices: Sequence[Continuation], progress: Progress = NO_PROGRESS
) -> list[tuple[float, bool]]:
    """Return the log probability of each choice in nats, and whether greedy decoding would produce it.

    A context that does not fit the context length with its choice loses its beginning. `progress` is called with the number
    of finished choices, and the total.

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
    results = []
    for found in score(lm, contexts, [choice.ids for choice in choices], progress=progress):
        log_p = float(found.log_p.sum(dtype="float64"))
        results.append((log_p, bool(found.is_best.all())))
    return results


def check_same(requests: Sequence[Any]) -> None:
    """Raise `UserError` if the processes of a run have different requests, which they could not answer together."""
    if process_count() > 1:
        digest = hashlib.sha256(repr(list(requests)).encode()).hexdigest()
        same_on_all(lambda: digest, lambda digest: {"the digest of the requests of a task": digest[:8]})


def windows(ids: list[int], start: int, length: int) -> list[Continuation]:
    """Split a text into windows that predict each of its ids once.

    A window has at most `length` inputs. The first window begins with the id `start`, each later window with the last id
    that the previous window predicts. The last window, if it predicts fewer ids, begins with as many earlier ids as fit.
    """
    sequence = [start, *ids]
    parts = []
    for begin in range(0, len(ids), length):
        end = min(begin + length, len(ids))
        first = max(end - length, 0)
        parts.append(Continuation(sequence[first : begin + 1], ids[begin:end]))
    return parts


def answer_texts(lm: LM, texts: Sequence[list[int]], progress: Progress = NO_PROGRESS) -> list[float]:
    """Return the log probability of each complete text, in nats; long texts are split into `windows`.

    `progress` is called with the number of finished windows, and the total.
    """
    start = prefix_id(lm)
    choices: list[Continuation] = []
    text_of_choice: list[int] = []
    for number, ids in enumerate(texts):
        parts = windows(ids, start, lm.config.model.block_size)
        choices += parts
        text_of_choice += [number] * len(parts)

    totals = [0.0] * len(texts)
    for number, (log_p, _) in zip(text_of_choice, answer_choices(lm, choices, progress), strict=True):
        totals[number] += log_p
    return totals
