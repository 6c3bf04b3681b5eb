"""Generate text with a model: whole, streamed, or by beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SEED, BeamParams, Overflow, SamplingParams
from jaxgpt.decoding.sampling import DIVERGED, CustomSampling, Filter, with_filters
from jaxgpt.errors import UserError, as_int
from jaxgpt.lm.arguments import (
    Prompt,
    Prompts,
    check_stop_ids,
    check_stops,
    encode_prompts,
    fit_context,
    make_settings,
    row_keys,
)
from jaxgpt.lm.engine import DecodeSession, cache_shape, search
from jaxgpt.lm.model import LM, placed, sampler_of, unstacked
from jaxgpt.lm.text import FinishReason, TextStream
from jaxgpt.parallel.host import device_memory

STREAM_BLOCK = 4  # tokens generated between two pieces of a stream
STOP_BLOCK = 32  # tokens generated between two searches for stop strings
LONG_BLOCK = 512  # in longer texts, for progress and Ctrl-C, which cannot interrupt a call of the device
WEIGHT_DIGITS = 28  # digits of length ** length_penalty: scores stay within float32


class Generation(NamedTuple):
    """The text generated after one prompt.

    Attributes:
        text: the new text: `prompt + text` is the whole.
        ids: the new ids, without those that ended the text.
        finish_reason: `stop` at an end token, a stop id or a stop string; `length` at the maximum number of tokens;
            `exhausted` where no_repeat_ngram_size forbids every token.
        score: `log p / length ** length_penalty` of a beam over all its tokens, including the end; None for sampled text.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    score: float | None = None


class Piece(NamedTuple):
    """A part of a text that is being generated.

    Attributes:
        row: index of the text, in the order in which `generate` returns them.
        text: the next part, whole characters only.
        done: the whole text, with its last piece; None before.
    """

    row: int
    text: str
    done: Generation | None


def generate(
    lm: LM,
    prompts: Prompts,
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: int | Sequence[int] = (),
    overflow: Overflow = "auto",
    lookup: int = 0,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> list[Generation]:
    """Continue each prompt. Prompts may differ in length; in float32, no text depends on the others.

    Always returns a list: one `Generation` per prompt and sequence, in the order of the prompts. A string, or a sequence of
    ids, is one prompt.

    Args:
        lm: model.
        prompts: a string or ids, or a list of them.
        max_new_tokens: maximum number of new tokens; None: 200, or fewer where the context ends.
        max_length: maximum number of tokens including the prompt, instead of max_new_tokens.
        stop: strings that end a text; not part of the text.
        stop_ids: ids that end a text, in addition to the end tokens of the tokenizer; not part of the text.
        overflow: when a text exceeds the context: "error", "slide" the window over the last tokens, or "auto": models with RoPE
            continue past the trained context, others raise an error.
        lookup: generate a single text faster by prompt lookup: where the last `lookup` tokens occurred before, draft the tokens
            that followed them and verify several in one pass. The text does not change. 3 suits texts that repeat their prompt;
            0 disables.
        filters: pure functions `(logits_BV, text) -> logits_BV`, with `text` a `TokenBuffer`, applied before the temperature.
            -inf forbids a token. Define each once: every new function is compiled.
        key: a seed, a `jax.random.key` (folded with the index of each row), or an array of keys, one per prompt or one per
            sequence.
        progress: called with the number of tokens generated so far and the maximum, for the longest text.
        **settings: fields of `SamplingParams` (temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size) and
            of `BeamParams` (num_beams, num_return_sequences, length_penalty, early_stopping).

    Raises:
        UserError: if an argument is invalid, or a text exceeds the context.
    """
    sampling, beams = make_settings(settings, SamplingParams, BeamParams)
    lm, sampling = unstacked(lm), with_filters(sampling, filters)
    request = _request(lm, prompts, max_new_tokens, max_length, stop, stop_ids, overflow, lookup)
    if beams.num_beams > 1:
        return _beam_search(lm, request, sampling, beams)
    repeated = request.repeat(beams.num_return_sequences)
    block = STOP_BLOCK if repeated.stops else LONG_BLOCK if max(repeated.new, default=0) > LONG_BLOCK else None
    key_B = row_keys(key, len(request.rows), beams.num_return_sequences)
    done = {piece.row: piece.done for piece in _pieces(lm, repeated, sampling, key_B, block, progress) if piece.done}
    return [done[row] for row in range(len(repeated.rows))]


def stream(
    lm: LM,
    prompts: Prompts,
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: int | Sequence[int] = (),
    overflow: Overflow = "auto",
    lookup: int = 0,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    block: int | None = STREAM_BLOCK,
    **sampling: Any,
) -> Iterator[Piece]:
    """Continue each prompt and yield its text in pieces. The pieces of a row, joined, are the text that `generate` returns.

    Takes the arguments of `generate`, without beams. `block` is the number of tokens generated between two pieces; None: all.
    """
    [params] = make_settings(sampling, SamplingParams)
    lm = unstacked(lm)
    request = _request(lm, prompts, max_new_tokens, max_length, stop, stop_ids, overflow, lookup)
    block = None if block is None else as_int("block", block, 1, 2**31 - 1)
    return _pieces(lm, request, with_filters(params, filters), row_keys(key, len(request.rows), 1), block)


class _Request(NamedTuple):
    """Validated arguments of `generate` and `stream`; lists have one entry per row."""

    prompts: list[Prompt]
    rows: list[list[int]]
    new: list[int]
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    overflow: Overflow
    lookup: int

    def repeat(self, sequences: int) -> _Request:
        """Repeat each row."""
        at = [row for row in range(len(self.rows)) for _ in range(sequences)]
        prompts, rows, new = self.prompts, self.rows, self.new
        return self._replace(prompts=[prompts[i] for i in at], rows=[rows[i] for i in at], new=[new[i] for i in at])

    def text_of(self, lm: LM, row: int, limit: int | None = None) -> TextStream:
        """Return an empty text stream for a row."""
        return TextStream(
            lm.tokenizer.decode,
            limit or self.new[row],
            self.stop_ids,
            self.stops,
            prompt=self.prompts[row].text_ids,
            byte_ids=lm.tokenizer.byte_ids,
        )


def _request(
    lm: LM,
    prompts: Prompts,
    max_new_tokens: int | None,
    max_length: int | None,
    stop: str | Sequence[str],
    stop_ids: int | Sequence[int],
    overflow: Overflow,
    lookup: int,
) -> _Request:
    model, tokenizer = lm.config.model, lm.tokenizer
    encoded = encode_prompts(tokenizer, model.vocab_size, prompts)
    rows, new = fit_context(model, encoded, max_new_tokens, max_length, overflow)
    ends = check_stop_ids(tokenizer, model.vocab_size, stop_ids)
    lookup = as_int("lookup", lookup, 0, model.block_size)
    return _Request(encoded, rows, new, check_stops(tokenizer, stop), ends, overflow, lookup)


def _pieces(
    lm: LM,
    request: _Request,
    sampling: SamplingParams,
    key_B: jax.Array,
    block: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Piece]:
    if not request.rows:
        return
    if request.lookup and (len(request.rows) > 1 or request.overflow == "slide"):
        raise UserError(
            f"lookup {request.lookup} needs a single prompt, a single sequence, and no overflow slide: leave it out, or "
            f"generate the texts one by one"
        )
    slide, context = request.overflow == "slide", lm.config.model.block_size
    rows, slots = cache_shape(request.rows, request.new, context, slide)
    check_memory(lm, rows, slots, max(request.new))
    session = DecodeSession(
        sampler_of(lm, sampling, request.stop_ids),
        lm.params,
        request.rows,
        key_B,
        request.new,
        context=context,
        slide=slide,
        lookup=request.lookup,
    )
    texts = [request.text_of(lm, row) for row in range(len(request.rows))]
    while going := [row for row, text in enumerate(texts) if text.finish_reason is None]:
        with placed(lm, rows), memory_errors():
            fresh_BT = session.next_tokens(1 if block and not session.made else block or max(request.new))
        if progress:
            progress(session.made, max(request.new))
        for row in going:
            text = texts[row]
            piece = text.add(fresh_BT[row].tolist())
            if text.finish_reason:
                yield Piece(row, piece, Generation(text.text, text.ids, text.finish_reason))
            elif piece:
                yield Piece(row, piece, None)
        session.finish([row for row in going if texts[row].finish_reason])


def _beam_search(lm: LM, request: _Request, sampling: SamplingParams, beams: BeamParams) -> list[Generation]:
    W, V, defaults = beams.num_beams, lm.config.model.vocab_size, SamplingParams()
    others = {"overflow": request.overflow.replace("slide", "auto"), "lookup": 0}
    unused = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    for name, value in (unused | {name: getattr(request, name) for name in others}).items():
        if value != getattr(defaults, name, others.get(name)):
            raise UserError(
                f"{name.replace('_', '-')} {value} has no effect in beam search: leave it out, or set num-beams {W} to 1"
            )
    if W * V >= 2**31:
        raise UserError(f"num-beams {W} is too many for a vocabulary of {V}: at most {2**31 // V}")
    if not request.rows:
        return []
    longest, penalty = max(request.new), beams.length_penalty
    if abs(penalty) * math.log10(longest) > WEIGHT_DIGITS:
        most = math.floor(10 * WEIGHT_DIGITS / math.log10(longest)) / 10
        raise UserError(
            f"length-penalty {penalty:g} is too far from 0 for {longest:,} new tokens: use {-most:g} to {most:g}, or lower "
            f"max-new-tokens"
        )
    rows, slots = cache_shape(request.rows, request.new, lm.config.model.block_size, False)
    check_memory(lm, 2 * rows * W, slots, max(request.new))  # twice: beams are copied when they are reordered

    def read(row: int, ids: Iterable[int], limit: int) -> TextStream:
        text = request.text_of(lm, row, limit)
        text.add(ids)
        return text

    def stopped(row: int, ids: Sequence[int]) -> bool:
        return read(row, ids, len(ids)).finish_reason == "stop"

    with placed(lm, rows), memory_errors():
        found = search(
            sampler_of(lm, replace(sampling, temperature=1.0), request.stop_ids),
            lm.params,
            request.rows,
            request.new,
            beams=beams,
            context=lm.config.model.block_size,
            stopped=stopped if request.stops else None,
        )
    fixes = {
        "raise no-repeat-ngram-size or lower max-new-tokens": sampling.no_repeat_ngram_size > 0,
        "let the filters keep more tokens": isinstance(sampling, CustomSampling),
    }
    fix = ", or ".join(fix for fix, possible in fixes.items() if possible) or "lower num-beams"
    out = []
    for row, limit in enumerate(request.new):
        for beam in range(beams.num_return_sequences):
            length, score = int(found.length_BW[row, beam]), float(found.score_BW[row, beam])
            if np.isnan(score):
                raise UserError(DIVERGED)
            if not length:
                raise UserError(f"prompt {row + 1} has only {beam} of {beams.num_return_sequences} texts: {fix}")
            text = read(row, found.ids_BWn[row, beam, :length].tolist(), limit)
            out.append(Generation(text.text, text.ids, text.finish_reason or "length", score))
    return out


def check_memory(lm: LM, rows: int, slots: int, new: int) -> None:
    """Check that the cache and the ids fit the memory of the device, before they are allocated."""
    c = lm.config.model
    width = jnp.dtype(lm.config.train.compute_dtype).itemsize
    needed = rows * (2 * c.n_layer * slots * c.kv_heads * c.head_width * width + 4 * max(slots, new))
    if needed > device_memory():
        raise UserError(
            f"not enough memory: {rows:,} rows of {max(slots, new):,} tokens take {needed / 1e9:,.0f} GB, "
            f"the device has {device_memory() / 1e9:,.0f} GB; lower max-new-tokens, num-beams or num-return-sequences"
        )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn XLA's out-of-memory errors into UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(
            "not enough memory on the device to generate: lower max-new-tokens, num-beams, num-return-sequences or the "
            "number of prompts"
        ) from None
