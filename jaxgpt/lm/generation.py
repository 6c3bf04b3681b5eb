"""Generate text with a model: whole, streamed, or by beam search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SEED, BeamParams, SamplingParams, TextParams
from jaxgpt.decoding.sampling import DIVERGED, Filter, with_filters
from jaxgpt.errors import UserError, as_int
from jaxgpt.lm.arguments import (
    Prompt,
    Prompts,
    all_stop_ids,
    check_stops,
    encode_prompts,
    fit_context,
    make_settings,
    row_keys,
)
from jaxgpt.lm.engine import DecodeSession, Prefix, bucket, cache_shape, search
from jaxgpt.lm.model import LM, for_decoding, placed, sampler_of
from jaxgpt.lm.text import FinishReason, TextStream
from jaxgpt.parallel.host import device_memory

STREAM_BLOCK = 4  # tokens generated between two pieces of a stream
STOP_BLOCK = 32  # tokens generated between two searches for stop strings
LONG_BLOCK = 512  # in longer texts, for progress and Ctrl-C, which cannot interrupt a call of the device


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
        filters: pure functions `(logits_BV, text) -> logits_BV`, with `text` a `TokenBuffer`, applied before the temperature.
            -inf forbids a token. Define each once: every new function is compiled.
        key: a seed, a `jax.random.key` (folded with the index of each row), or an array of keys, one per prompt or one per
            sequence.
        progress: called with the number of tokens generated so far and the maximum, for the longest text.
        **settings: fields of `TextParams` (max_new_tokens, max_length, stop, stop_ids, overflow, lookup), of `SamplingParams`
            (temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size) and of `BeamParams` (num_beams,
            num_return_sequences, length_penalty, early_stopping). `jaxgpt sample --help` describes them.

    Raises:
        UserError: if an argument is invalid, or a text exceeds the context.
    """
    text, sampling, beams = make_settings(settings, TextParams, SamplingParams, BeamParams)
    request, sampling = read_request(lm, prompts, text), with_filters(sampling, filters)
    if beams.num_beams > 1:
        return _beam_search(request, sampling, beams)
    key_B = row_keys(key, len(request.prompts), beams.num_return_sequences)
    request = request.repeat(beams.num_return_sequences)
    block = STOP_BLOCK if text.stop else LONG_BLOCK if max(request.new, default=0) > LONG_BLOCK else None
    done = {piece.row: piece.done for piece in _pieces(request, sampling, key_B, block, progress) if piece.done}
    return [done[row] for row in range(len(request.prompts))]


def stream(
    lm: LM,
    prompts: Prompts,
    *,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    block: int | None = STREAM_BLOCK,
    **settings: Any,
) -> Iterator[Piece]:
    """Continue each prompt and yield its text in pieces. The pieces of a row, joined, are the text that `generate` returns.

    Takes the arguments of `generate`, without beams. `block` is the number of tokens generated between two pieces; None: all.
    """
    text, sampling = make_settings(settings, TextParams, SamplingParams)
    request = read_request(lm, prompts, text)
    block = None if block is None else as_int("block", block, 1, 2**31 - 1)
    return _pieces(request, with_filters(sampling, filters), row_keys(key, len(request.prompts), 1), block)


class Request(NamedTuple):
    """Texts to generate.

    Attributes:
        lm: model.
        prompts: one prompt per row.
        new: maximum number of new tokens of each row.
        params: their length and end; `stop_ids` includes the end tokens.
    """

    lm: LM
    prompts: list[Prompt]
    new: list[int]
    params: TextParams

    @property
    def rows(self) -> list[list[int]]:
        """The ids of each prompt."""
        return [prompt.ids for prompt in self.prompts]

    def repeat(self, sequences: int) -> Request:
        """Repeat each row."""
        at = [row for row in range(len(self.prompts)) for _ in range(sequences)]
        return self._replace(prompts=[self.prompts[i] for i in at], new=[self.new[i] for i in at])

    def text(self, row: int, limit: int | None = None) -> TextStream:
        """Return the empty text of a row."""
        tokenizer, params, prompt = self.lm.tokenizer, self.params, self.prompts[row].text_ids
        return TextStream(
            tokenizer.decode,
            limit or self.new[row],
            params.stop_ids,
            params.stop,
            prompt=prompt,
            byte_ids=tokenizer.byte_ids,
        )

    def session(self, sampling: SamplingParams, key_B: jax.Array, before: Prefix | None = None) -> DecodeSession:
        """Return a session that generates the texts.

        Raises:
            UserError: if the memory of the device is too small.
        """
        lm, context, slide = self.lm, self.lm.config.model.block_size, self.params.overflow == "slide"
        rows, slots = cache_shape(self.rows, self.new, context, slide)
        check_memory(lm, rows, slots, max(self.new))
        with placed(lm, rows), memory_errors():
            return DecodeSession(
                sampler_of(lm, sampling, self.params.stop_ids),
                lm.params,
                self.rows,
                key_B,
                self.new,
                context=context,
                slide=slide,
                lookup=self.params.lookup,
                before=before,
            )


def read_request(lm: LM, prompts: Prompts, params: TextParams) -> Request:
    """Encode prompts, and check that their texts fit the model.

    Raises:
        UserError: if a prompt, a length, a stop id or a stop string is invalid.
    """
    lm, model, tokenizer = for_decoding(lm), lm.config.model, lm.tokenizer
    encoded = encode_prompts(tokenizer, model.vocab_size, prompts)
    new = fit_context(model, encoded, params)
    check_stops(tokenizer, params.stop)
    return Request(
        lm, encoded, new, replace(params, stop_ids=all_stop_ids(tokenizer, model.vocab_size, params.stop_ids))
    )


def _pieces(
    request: Request,
    sampling: SamplingParams,
    key_B: jax.Array,
    block: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Piece]:
    if not request.prompts:
        return
    if request.params.lookup and (len(request.prompts) > 1 or request.params.overflow == "slide"):
        raise UserError(
            f"lookup {request.params.lookup} needs a single prompt, a single sequence, and no overflow slide: leave it out, or "
            f"generate the texts one by one"
        )
    texts = [request.text(row) for row in range(len(request.prompts))]
    yield from decode(request, request.session(sampling, key_B), texts, block, progress)


def decode(
    request: Request,
    session: DecodeSession,
    texts: Sequence[TextStream],
    block: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Piece]:
    """Generate the texts of a session, `block` tokens at a time (None: all), and yield their pieces."""
    longest = max(request.new)
    while going := [row for row, text in enumerate(texts) if text.finish_reason is None]:
        with placed(request.lm, bucket(len(texts))), memory_errors():
            fresh_BT = session.next_tokens(1 if block and not session.made else block or longest)
        if progress:
            progress(session.made, longest)
        for row in going:
            text = texts[row]
            piece = text.add(fresh_BT[row].tolist())
            if text.finish_reason:
                yield Piece(row, piece, Generation(text.text, text.ids, text.finish_reason))
            elif piece:
                yield Piece(row, piece, None)
        session.finish([row for row in going if texts[row].finish_reason])


def _beam_search(request: Request, sampling: SamplingParams, beams: BeamParams) -> list[Generation]:
    lm, params, W = request.lm, request.params, beams.num_beams
    V, context = lm.config.model.vocab_size, lm.config.model.block_size
    unused = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    unused = {name: value for name, value in unused.items() if value != getattr(SamplingParams(), name)}
    if params.lookup:
        unused["lookup"] = params.lookup
    if params.overflow == "slide":
        unused["overflow"] = params.overflow
    for name, value in unused.items():
        raise UserError(
            f"{name.replace('_', '-')} {value} has no effect in beam search: leave it out, or set num-beams {W} to 1"
        )
    if W * V >= 2**31:
        raise UserError(f"num-beams {W} is too many for a vocabulary of {V}: at most {2**31 // V}")
    if not request.prompts:
        return []
    rows, slots = cache_shape(request.rows, request.new, context, False)
    check_memory(lm, 2 * rows * W, slots, max(request.new))  # twice: beams are copied when they are reordered

    def read(row: int, ids: Iterable[int], limit: int) -> TextStream:
        text = request.text(row, limit)
        text.add(ids)
        return text

    def stopped(row: int, ids: Sequence[int]) -> bool:
        return read(row, ids, len(ids)).finish_reason == "stop"

    with placed(lm, rows), memory_errors():
        found = search(
            sampler_of(lm, replace(sampling, temperature=1.0), params.stop_ids),
            lm.params,
            request.rows,
            request.new,
            beams=beams,
            context=context,
            stopped=stopped if params.stop else None,
        )
    out = []
    for row, limit in enumerate(request.new):
        for beam in range(beams.num_return_sequences):
            length, score = int(found.length_BW[row, beam]), float(found.score_BW[row, beam])
            if np.isnan(score):
                raise UserError(DIVERGED)
            if not length:
                raise UserError(
                    f"prompt {row + 1} has only {beam} of {beams.num_return_sequences} texts: raise no-repeat-ngram-size, let "
                    f"filters keep more tokens, or lower num-beams"
                )
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
