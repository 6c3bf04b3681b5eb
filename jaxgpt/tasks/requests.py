"""The three kinds of requests of a task, answered by a model: choices, complete texts, and texts to generate.

The definitions are the same as in lm-evaluation-harness for causal models; this module does not import the harness.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.data.control_tokens import ControlTokens
from jaxgpt.data.tokenizer import Ids, Tokenizer
from jaxgpt.errors import UserError, short_repr
from jaxgpt.lm import LM, score
from jaxgpt.lm.arguments import make_settings, row_keys, start_ids
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.generation import decode, read_request
from jaxgpt.options import SEED
from jaxgpt.parallel.processes import process_count, same_on_all

ANSWER_ROWS = 16  # texts generated in a batch
ANSWER_BLOCK = 8  # tokens between two searches for stop strings: most answers of tasks are short
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")  # settings shared by requests and `generate`

Count = Callable[[int, int], None]  # called with the number of finished requests so far, and the total


def no_count(done: int, total: int) -> None:
    """Ignore the progress."""


class Continuation(NamedTuple):
    """A continuation with a probability that a task compares: its ids, and the ids of its context."""

    context: list[int]
    ids: list[int]


class GenerationRequest(NamedTuple):
    """A text to continue.

    Attributes:
        text: the prompt.
        stop: strings that end the answer.
        new_tokens: maximum number of tokens of the answer.
        sampling: settings of `generate`; `temperature` 0 for greedy answers.
    """

    text: str
    stop: tuple[str, ...]
    new_tokens: int
    sampling: Mapping[str, Any]


def encode(lm: LM, text: str, with_start: bool = True) -> list[int]:
    """Encode a text; names of special tokens become their ids, as in transformers.

    With `with_start`, the ids begin with the tokenizer's beginning-of-text ids.
    """
    ids: list[int] = lm.tokenizer.encode_special(text).tolist()
    before = list(lm.tokenizer.bos_ids)
    if not with_start or ids[: len(before)] == before:
        return ids
    return before + ids


def prefix_id(lm: LM) -> int:
    """Return the id before a text without context."""
    return start_ids(lm.tokenizer)[0]


def answer_choices(lm: LM, choices: Sequence[Continuation], count: Count = no_count) -> list[tuple[float, bool]]:
    """Return the log probability of each choice in nats, and whether greedy decoding would produce it.

    A context that does not fit the context length with its choice loses its beginning.

    Raises:
        UserError: if a choice is empty or longer than the context length.
    """
    _check_same(choices)
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


def _check_same(requests: Sequence[Any]) -> None:
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


def answer_prompts(
    lm: LM, prompts: Sequence[GenerationRequest], count: Count = no_count, seed: int = SEED
) -> list[str]:
    """Return the answer to each prompt, without its stop string; a prompt without room for an answer loses its beginning.

    Raises:
        UserError: if the answers of a request may fill the whole context.
    """
    _check_same(prompts)
    context_length = lm.config.model.block_size
    groups: dict[str, list[int]] = {}
    for n, prompt in enumerate(prompts):
        settings = json.dumps([prompt.stop, prompt.new_tokens, dict(prompt.sampling)])
        groups.setdefault(settings, []).append(n)

    answers: dict[int, str] = {}
    for members in groups.values():
        _, stop, new_tokens, sampling = prompts[members[0]]
        longest = context_length - new_tokens
        if longest < 1:
            raise UserError(
                f"the task generates up to {new_tokens} tokens, and the model's context is {context_length}: set a lower "
                f"max_gen_toks in the task, or choose a different task"
            )
        ids = {n: encode(lm, prompts[n].text)[-longest:] or [prefix_id(lm)] for n in members}

        # Batches of prompts of similar lengths.
        order = sorted(members, key=lambda n: -len(ids[n]))
        for first in range(0, len(order), ANSWER_ROWS):
            batch = order[first : first + ANSWER_ROWS]
            texts = _continue(lm, [ids[n] for n in batch], stop, new_tokens, sampling, seed + first)
            answers |= dict(zip(batch, texts, strict=True))
            count(len(answers), len(prompts))
    return [answers[n] for n in range(len(prompts))]


class _Visible:
    """Decodes answers as transformers does: without special tokens, and without the prompt.

    SentencePiece omits the space before the first word of a text: the answer after "The capital is" is "Paris".
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.hidden = ControlTokens(tokenizer, tokenizer.special.tokens).names

    def decode(self, ids: Ids) -> str:
        """Decode the ids of ordinary text."""
        return self._tokenizer.decode([i for i in ids if i not in self.hidden])

    def settled(self, ids: list[int]) -> list[int]:
        """Return the first ids, with a text that further ids cannot change."""
        return self._tokenizer.settled(ids)


def _continue(
    lm: LM, prompts: Sequence[list[int]], stop: Sequence[str], new_tokens: int, sampling: Mapping[str, Any], seed: int
) -> list[str]:
    """Return the text after each prompt, without its stop string."""
    visible = _Visible(lm.tokenizer)
    # A special token has no text in an answer: if a stop string is its name, its id ends the answer. The harness also stops at
    # the name of the end-of-text token in ordinary text.
    ids = [i for i, name in visible.hidden.items() if name in stop]
    end = "" if lm.tokenizer.eos_id is None else lm.tokenizer.decode([lm.tokenizer.eos_id])
    stops = [each for each in (*stop, end) if each]

    given = {"max_new_tokens": new_tokens, "stop": stops, "stop_ids": ids, **sampling}
    settings = with_defaults(lm.tokenizer, given)
    params, values = make_settings(settings, TextParams, SamplingParams)
    request = read_request(lm, list(prompts), params)
    sampler = request.sampler(values)
    alone = request._replace(
        lm=request.lm._replace(tokenizer=visible),  # type: ignore[arg-type]
        prompts=[[] for _ in prompts],
    )
    pieces = decode(alone, sampler, row_keys(seed, len(prompts)), ANSWER_BLOCK)
    done = {piece.row: piece.done.text for piece, _ in pieces if piece.done}
    return [done[row] for row in range(len(prompts))]


def as_prompt(text: str, request: Mapping[str, Any]) -> GenerationRequest:
    """Return a prompt with the settings of a request of the harness, after its `normalize_gen_kwargs`.

    Raises:
        UserError: if a setting has no equivalent.
    """
    values = dict(request)
    stop = tuple(each for each in values.pop("until", []) if each)
    new_tokens = int(values.pop("max_gen_toks"))
    is_sampled = values.pop("do_sample", False)
    temperature = values.pop("temperature", 1.0)
    sampling = {name: values.pop(name) for name in SAMPLING if name in values}
    if values:
        name = next(iter(values))
        raise UserError(
            f"the task sets {name} {short_repr(values[name])} in generation_kwargs, which jaxgpt does not support: use "
            f"{', '.join(('until', 'max_gen_toks', 'do_sample', 'temperature', *SAMPLING))}"
        )
    return GenerationRequest(text, stop, new_tokens, {"temperature": temperature if is_sampled else 0.0} | sampling)
