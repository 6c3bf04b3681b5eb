"""Ask a model for text: whole, as it is made, or the likeliest that beams come upon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import UserError
from jaxgpt.decoding import Beams, Policy, Session, TextStream, search
from jaxgpt.lm.model import LM, functions_of, placed
from jaxgpt.prompts import check_stop_ids, check_stops, encode_rows

STREAM_BLOCK = 4  # tokens between looks at what was made, where someone reads along
STOP_BLOCK = 32  # where stop strings are looked for


class Generation(NamedTuple):
    """What was generated after one prompt.

    Attributes:
        text: the new text.
        ids: the new ids, without those that ended the text.
        finish_reason: `stop` where an end token, a stop id or a stop string came, `length` where the number of tokens was
            reached.
        score: of a beam, `log p / length ** length_penalty`, of all its tokens, those that ended it included; None where
            tokens were drawn.
    """

    text: str
    ids: list[int]
    finish_reason: Literal["stop", "length"]
    score: float | None = None


class Piece(NamedTuple):
    """A portion of text on its way.

    Attributes:
        row: whose it is, counted as `generate` returns them.
        text: what comes next, whole characters only.
        done: the whole, with the last piece of a row; None before.
    """

    row: int
    text: str
    done: Generation | None


def generate(
    lm: LM,
    prompts: Sequence[str | Sequence[int]],
    *,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    **settings: Any,
) -> list[Generation]:
    """Continue each prompt. Prompts may differ in length; no row depends on its company.

    Args:
        lm: the model.
        prompts: strings, or ids.
        num_beams: above 1: beam search, the likeliest of so many texts at once; nothing is drawn.
        num_return_sequences: texts for each prompt, one after the other: draws, or the best of the beams.
        length_penalty: beams are compared by `log p / length ** length_penalty`.
        early_stopping: true: stop when num_beams texts have finished; false: when no other seems able to become better;
            never: when none can.
        settings: as `stream` takes them.

    Raises:
        UserError: as `stream`; settings of chance together with beams.
    """
    beams = Beams(num_beams, num_return_sequences, length_penalty, early_stopping)
    if num_beams == 1:
        rows = [prompt for prompt in prompts for _ in range(num_return_sequences)]
        block = STOP_BLOCK if settings.get("stop") else None
        done = {piece.row: piece.done for piece in stream(lm, rows, block=block, **settings) if piece.done}
        return [done[row] for row in range(len(rows))]
    return _beam_search(lm, prompts, beams, **settings)


def stream(
    lm: LM,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    beyond: Literal["error", "slide"] = "error",
    key: jax.Array | None = None,
    block: int | None = STREAM_BLOCK,
) -> Iterator[Piece]:
    """Continue each prompt and give out its text as it is made.

    Args:
        lm: the model.
        prompts: strings, or ids.
        max_new_tokens: at most so many tokens; None: 100.
        max_length: instead, at most so many with the prompt.
        temperature: logits are divided by it; 0: always the likeliest.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together reach this probability; 1: all.
        min_p: only what is at least so many times as likely as the likeliest; 0: all.
        repetition_penalty: what was said before is made less likely by it; 1: off.
        no_repeat_ngram_size: so many tokens in a row never come twice; 0: off.
        stop: text that ends a row, across whatever tokens, and is no part of it.
        stop_ids: ids that end a row and are no part of it; the tokenizer's end token always is one.
        beyond: what becomes of a text longer than the context: an error, or the model sees its end only (`slide`).
        key: of the draws, one, or one a prompt; None: `jax.random.key(0)`.
        block: tokens between two looks; None: as many as there are.

    Raises:
        UserError: a setting, prompt or stop string that cannot work, or more tokens than the context holds.
    """
    policy = Policy(temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size)
    stops = check_stops(lm.tokenizer, stop)
    ends = check_stop_ids(lm.tokenizer, lm.config.model.vocab_size, stop_ids)
    rows, new = encode_rows(lm.tokenizer, lm.config.model, prompts, max_new_tokens, max_length, beyond)
    return _pieces(lm, rows, new, policy, stops, ends, beyond == "slide", key, block) if rows else iter(())


def _pieces(
    lm: LM,
    rows: list[list[int]],
    new: list[int],
    policy: Policy,
    stops: tuple[str, ...],
    ends: tuple[int, ...],
    slide: bool,
    key: jax.Array | None,
    block: int | None,
) -> Iterator[Piece]:
    key = jax.random.key(0) if key is None else key
    key_B = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(rows))) if key.ndim == 0 else key
    session = Session(
        lm.params,
        rows,
        key_B,
        new,
        model=functions_of(lm),
        policy=policy,
        stop_ids=ends,
        context=lm.config.model.block_size,
        slide=slide,
    )
    texts = [TextStream(lm.tokenizer.decode, n, ends, stops) for n in new]
    while going := [row for row, text in enumerate(texts) if text.finish_reason is None]:
        with placed(lm):
            fresh_BT = session.more(1 if block and not session.made else block or max(new))
        for row in going:
            text = texts[row]
            piece = text.add(fresh_BT[row].tolist())
            if text.finish_reason:
                yield Piece(row, piece, Generation(text.text, text.ids, text.finish_reason))
            elif piece:
                yield Piece(row, piece, None)
        session.finish([row for row in going if texts[row].finish_reason])


def _beam_search(
    lm: LM,
    prompts: Sequence[str | Sequence[int]],
    beams: Beams,
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    **others: Any,
) -> list[Generation]:
    if others:
        raise UserError(f"{min(others).replace('_', '-')} has no part in beam search (num-beams {beams.num_beams})")
    policy = Policy(repetition_penalty=repetition_penalty, no_repeat_ngram_size=no_repeat_ngram_size)
    stops = check_stops(lm.tokenizer, stop)
    ends = check_stop_ids(lm.tokenizer, lm.config.model.vocab_size, stop_ids)
    rows, new = encode_rows(lm.tokenizer, lm.config.model, prompts, max_new_tokens, max_length)
    if not rows:
        return []

    def read(ids: Sequence[int], limit: int) -> TextStream:
        text = TextStream(lm.tokenizer.decode, limit, ends, stops)
        text.add(ids)
        return text

    def stopped(ids: Sequence[int]) -> bool:
        return read(ids, len(ids)).finish_reason == "stop"

    with placed(lm):
        found = search(
            lm.params,
            rows,
            new,
            model=functions_of(lm),
            policy=policy,
            beams=beams,
            stop_ids=ends,
            context=lm.config.model.block_size,
            stopped=stopped if stops else None,
        )
    out = []
    for row, limit in enumerate(new):
        for beam in range(beams.num_return_sequences):
            text = read(found.ids_BWn[row, beam, : found.length_BW[row, beam]].tolist(), limit)
            score = float(found.score_BW[row, beam])
            out.append(Generation(text.text, text.ids, text.finish_reason or "length", score))
    return out
