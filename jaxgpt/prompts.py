"""What a user asks for, checked before anything is computed: prompts, lengths, what ends a text."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.data import Tokenizer


def encode_rows(
    tokenizer: Tokenizer,
    model: ModelConfig,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int | None,
    max_length: int | None,
    beyond: str = "error",
) -> tuple[list[list[int]], list[int]]:
    """Ids of each prompt, and how many new ones it may get.

    Args:
        tokenizer: for prompts that are strings.
        model: whose vocabulary and context they have to keep to.
        prompts: strings, or ids.
        max_new_tokens: at most so many tokens; None: 100.
        max_length: instead, at most so many with the prompt.
        beyond: what becomes of a text longer than the context: an error, or the model sees its end only (`slide`).

    Raises:
        UserError: a prompt or number that cannot work.
    """
    if beyond not in ("error", "slide"):
        raise UserError(f"beyond must be error or slide, not {beyond!r}")
    rows = [encode_prompt(tokenizer, model.vocab_size, prompt) for prompt in prompts]
    new = limits(rows, max_new_tokens, max_length)
    if beyond == "slide":
        return [ids[-model.block_size :] for ids in rows], new
    check_room(model, rows, new)
    return rows, new


def encode_prompt(tokenizer: Tokenizer, vocab_size: int, prompt: str | Sequence[int]) -> list[int]:
    """Ids of a prompt. An empty text begins where texts begin: after an end token, or after a new line.

    Raises:
        UserError: no ids, or ids beyond the vocabulary.
    """
    ids = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids and not isinstance(prompt, str):
        raise UserError("the prompt has no ids")
    ids = ids or beginning(tokenizer)[0]
    for place, i in enumerate(ids):
        if not 0 <= i < vocab_size:
            raise UserError(f"id {i} at position {place} of the prompt: the vocabulary has {vocab_size}")
    return ids


def beginning(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """What stands before the first word of a text, as ids and in words.

    Raises:
        UserError: nothing that this tokenizer knows.
    """
    if tokenizer.eos_id is not None:
        return [tokenizer.eos_id], "the end token"
    try:
        ids: list[int] = tokenizer.encode("\n").tolist()
    except UserError:
        ids = []
    if not ids:
        raise UserError("the prompt is empty, and this tokenizer has no sign for a beginning: give a prompt")
    return ids, "a new line"


def limits(prompts: Sequence[Sequence[int]], max_new_tokens: int | None, max_length: int | None) -> list[int]:
    """How many new tokens each prompt may get.

    Raises:
        UserError: both settings, too small a number, or a prompt that is as long already.
    """
    if max_length is None:
        new = 100 if max_new_tokens is None else max_new_tokens
        if new < 1:
            raise UserError(f"max-new-tokens must be at least 1, not {new}")
        return [new] * len(prompts)
    if max_new_tokens is not None:
        raise UserError("max-length counts the prompt, max-new-tokens does not: choose one")
    for ids in prompts:
        if len(ids) >= max_length:
            raise UserError(f"the prompt of {len(ids)} tokens leaves no room within max-length {max_length}")
    return [max_length - len(ids) for ids in prompts]


def check_room(model: ModelConfig, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> None:
    """Texts that end within the context; rotary positions may go on.

    Raises:
        UserError: a text that does not.
    """
    if model.positions == "rope":
        return
    for ids, n in zip(prompts, new, strict=True):
        if len(ids) + n - 1 > model.block_size:
            raise UserError(
                f"a prompt of {len(ids)} tokens and {n} new ones do not fit the context of {model.block_size}: "
                f"at most {max(model.block_size - len(ids) + 1, 0)} can be generated, "
                f"or any number with beyond=slide, which forgets the beginning"
            )


def check_stop_ids(tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that end a text, the tokenizer's end token among them.

    Raises:
        UserError: one beyond the vocabulary.
    """
    for i in stop_ids:
        if not 0 <= i < vocab_size:
            raise UserError(f"stop id {i}: the vocabulary has {vocab_size}")
    return tuple(sorted({*stop_ids} | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set())))


def check_stops(tokenizer: Tokenizer, stops: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings, each of which can be made.

    Raises:
        UserError: one that cannot.
    """
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    for stop in stops:
        if not stop:
            raise UserError("a stop string is empty")
        try:
            # A word in the middle has to be one; the first and the last may be cut.
            parts = stop.split(" ") if tokenizer.glue else []
            possible = all(parts[1:-1]) and _words_hold(tokenizer, parts) if parts else _round_trip(tokenizer, stop)
        except UserError as e:
            raise UserError(f"stop string {stop!r} can never be made: {e}") from None
        if not possible:
            raise UserError(f"stop string {stop!r} can never be made by this tokenizer")
    return stops


def _words_hold(tokenizer: Tokenizer, parts: list[str]) -> bool:
    words = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    if len(parts) == 1:
        return any(parts[0] in word for word in words)
    tokenizer.encode(" ".join(parts[1:-1]))
    return any(w.endswith(parts[0]) for w in words) and any(w.startswith(parts[-1]) for w in words)


def _round_trip(tokenizer: Tokenizer, stop: str) -> bool:
    return stop in tokenizer.decode(tokenizer.encode(stop))
