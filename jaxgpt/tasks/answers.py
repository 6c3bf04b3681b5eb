"""Requests of tasks for answers: texts that a model generates, as lm-evaluation-harness decodes them.

The definitions are the same as in lm-evaluation-harness for causal models; this module does not import the harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.data.tokenizers.base import Ids, Tokenizer
from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.errors import UserError, short_repr
from jaxgpt.lm import LM
from jaxgpt.lm.arguments import make_settings, row_keys
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.generation import decode, generations
from jaxgpt.lm.request import read_request
from jaxgpt.options import SEED
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.tasks.requests import check_same, encode, prefix_id

ANSWER_ROWS = 16  # texts generated in a batch
ANSWER_BLOCK = 8  # tokens between two searches for stop strings: most answers of tasks are short
# Settings of requests that are passed to `generate` unchanged.
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


class AnswerSettings(NamedTuple):
    """The settings of an answer.

    Attributes:
        stop: strings that end the answer.
        new_tokens: maximum number of tokens of the answer.
        sampling: settings of `generate`; `temperature` 0 for greedy answers.
    """

    stop: tuple[str, ...]
    new_tokens: int
    sampling: Mapping[str, Any]


class GenerationRequest(NamedTuple):
    """A text to continue, and the settings of the answer."""

    text: str
    settings: AnswerSettings


def as_prompt(text: str, request: Mapping[str, Any]) -> GenerationRequest:
    """Convert a request of the harness, after the harness' `normalize_gen_kwargs`, to a prompt with settings.

    Raises:
        UserError: if a setting has no equivalent.
    """
    values = dict(request)
    stop = tuple(string for string in values.pop("until", []) if string)
    new_tokens = int(values.pop("max_gen_toks"))

    is_sampled = values.pop("do_sample", False)
    temperature = values.pop("temperature", 1.0)
    sampling: dict[str, Any] = {"temperature": temperature if is_sampled else 0.0}
    for name in SAMPLING:
        if name in values:
            sampling[name] = values.pop(name)

    if values:
        name = next(iter(values))
        raise UserError(
            f"the task sets {name} {short_repr(values[name])} in generation_kwargs, which jaxgpt does not support: use "
            f"{', '.join(('until', 'max_gen_toks', 'do_sample', 'temperature', *SAMPLING))}"
        )
    return GenerationRequest(text, AnswerSettings(stop, new_tokens, sampling))


def answer_prompts(
    lm: LM, prompts: Sequence[GenerationRequest], progress: Progress = NO_PROGRESS, seed: int = SEED
) -> list[str]:
    """Return the answer to each prompt, without its stop string; a prompt without room for an answer loses its beginning.

    `progress` is called with the number of finished answers, and the total.

    Raises:
        UserError: if an answer may fill the whole context, or the processes of a run have different requests.
    """
    check_same(prompts)
    answers: dict[int, str] = {}
    for settings, members in _by_settings(prompts):
        longest = _longest_prompt(lm, settings)
        ids = {}
        for n in members:
            ids[n] = encode(lm, prompts[n].text)[-longest:] or [prefix_id(lm)]

        # Batch prompts of similar lengths.
        order = sorted(members, key=lambda n: -len(ids[n]))
        for first in range(0, len(order), ANSWER_ROWS):
            batch = order[first : first + ANSWER_ROWS]
            # Every batch has its own seed.
            texts = _continue(lm, [ids[n] for n in batch], settings, seed + len(answers))
            answers |= dict(zip(batch, texts, strict=True))
            progress(len(answers), len(prompts))
    return [answers[n] for n in range(len(prompts))]


def _by_settings(prompts: Sequence[GenerationRequest]) -> list[tuple[AnswerSettings, list[int]]]:
    """Return each distinct value of the settings and the indices of its prompts."""
    groups: list[tuple[AnswerSettings, list[int]]] = []
    for n, prompt in enumerate(prompts):
        for settings, members in groups:  # a linear search: the few distinct settings are not hashable
            if settings == prompt.settings:
                members.append(n)
                break
        else:
            groups.append((prompt.settings, [n]))
    return groups


def _longest_prompt(lm: LM, settings: AnswerSettings) -> int:
    """Return the maximum length of a prompt with room for an answer; raise `UserError` if the answer may fill the context."""
    context_length = lm.config.model.block_size
    longest = context_length - settings.new_tokens
    if longest < 1:
        raise UserError(
            f"the task generates up to {settings.new_tokens} tokens, and the model's context is {context_length}: set a "
            f"lower max_gen_toks in the task, or choose a different task"
        )
    return longest


def _continue(lm: LM, prompts: Sequence[list[int]], settings: AnswerSettings, seed: int) -> list[str]:
    """Return the text after each prompt, without its stop string."""
    decoder = _VisibleText(lm.tokenizer)
    ends = {"stop": _stop_strings(lm.tokenizer, settings.stop), "stop_ids": decoder.ids_of(settings.stop)}
    given = {"max_new_tokens": settings.new_tokens, **ends, **settings.sampling}
    params, sampling = make_settings(with_defaults(lm.tokenizer, given), TextParams, SamplingParams)

    request = read_request(lm, list(prompts), params).decoded_alone(decoder)
    pieces = decode(request, request.make_sampler(sampling), row_keys(seed, len(prompts)), ANSWER_BLOCK)
    return [generation.text for generation in generations(pieces)]


def _stop_strings(tokenizer: Tokenizer, stop: Sequence[str]) -> list[str]:
    """Return the strings that end an answer: as in the harness, also the name of the end-of-text token in ordinary text."""
    end = "" if tokenizer.eos_id is None else tokenizer.decode([tokenizer.eos_id])
    return [string for string in (*stop, end) if string]


class _VisibleText:
    """Decodes answers as transformers does: without special tokens, and without the prompt.

    SentencePiece omits the space before the first word of a text: the answer after "The capital is" is "Paris".
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden = ControlTokens(tokenizer, tokenizer.special.tokens).names

    def decode(self, ids: Ids) -> str:
        """Decode the ids of ordinary text."""
        return self._tokenizer.decode([i for i in ids if i not in self._hidden])

    def settled(self, ids: list[int]) -> list[int]:
        """Return a prefix of the ids with a text that further ids cannot change."""
        return self._tokenizer.settled(ids)

    def ids_of(self, stop: Sequence[str]) -> list[int]:
        """Return the ids of special tokens named as stop strings: the text of an answer never contains their names."""
        return [i for i, name in self._hidden.items() if name in stop]
