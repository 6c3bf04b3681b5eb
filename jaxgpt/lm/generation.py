"""Generate text with a model: complete, streamed, or by beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.config import BeamParams, SamplingParams, TextParams
from jaxgpt.decoding.sampler import Sampler, SamplerState
from jaxgpt.decoding.sampling import Filter
from jaxgpt.lm import engine
from jaxgpt.lm.arguments import Prompts, as_filters, as_prompts, make_settings, row_keys
from jaxgpt.lm.beams import BEAMS_REJECT, beam_search
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.mesh_part import own_part
from jaxgpt.lm.model import LM, check_for_text
from jaxgpt.lm.placement import block_on_mesh, row_ways
from jaxgpt.lm.request import Request, read_request
from jaxgpt.lm.results import Generation, Piece, generation_of
from jaxgpt.lm.reuse import Reuse, resume
from jaxgpt.options import SEED
from jaxgpt.parallel.processes import from_all
from jaxgpt.settings import as_int

STREAM_BLOCK = 4  # default tokens per call in `stream`
BLOCK = 32  # tokens per call in `generate`, which handles stop strings, progress and Ctrl-C between calls


def generate(
    lm: LM,
    prompts: Prompts,
    *,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> list[Generation]:
    """Continue each prompt; except for rounding, a text does not depend on the other texts.

    Always returns a list: `num_return_sequences` generations per prompt (default: 1), in the order of the prompts. A string,
    or a sequence of ids, is one prompt.

    Weights on a mesh stay where they are. If the mesh has the devices of several processes, all of them must call
    `generate` with the same arguments, and receive all texts. The mesh is then cut into parts that have all weights,
    and each part generates an equal share of the texts (`own_part`).

    Args:
        lm: model.
        prompts: a string or ids, or a list of them.
        filters: pure functions `(logits_BV, text) -> logits_BV`, with `text` a `TokenBuffer`, applied before the temperature.
            -inf forbids a token. Define each filter once: every new function is compiled.
        key: a seed or a `jax.random.key`, folded with the index of each text; or an array of keys, one per text.
        progress: callback with the number of sampling steps so far and the maximum, for the texts that this process generates;
            not called with beams.
        **settings: fields of `TextParams` (max_new_tokens, max_length, stop, stop_ids, overflow, lookup), of `SamplingParams`
            (temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size) and of `BeamParams` (num_beams,
            num_return_sequences, length_penalty, early_stopping). `jaxgpt sample --help` describes them. Sampling settings that
            are not given come from the model's generation_config.json, if any; `**vars(SamplingParams())` ignores it.

    Raises:
        UserError: if an argument is invalid, a text exceeds the context (`overflow`) or the memory, a logit is NaN, or beam
            search finds too few texts.
    """
    check_for_text(lm)
    has_beams = settings.get("num_beams", 1) != 1
    settings = with_defaults(lm.tokenizer, settings, without=BEAMS_REJECT if has_beams else ())
    text, sampling, beams = make_settings(settings, TextParams, SamplingParams, BeamParams)
    custom = as_filters(filters)
    listed = as_prompts(prompts)
    if not listed:
        return []

    # Sampling generates each text of a prompt separately, with a key; a beam search generates all texts of a prompt.
    sequences = beams.num_return_sequences if beams.num_beams == 1 else 1
    keys = row_keys(key, len(listed) * sequences)

    def generate_on(lm: LM, prompts: list[Any], keys: jax.Array) -> list[Generation]:
        request = read_request(lm, prompts, text, sequences)
        if beams.num_beams > 1:
            return beam_search(request, sampling, custom, beams)
        return generations(decode(request, request.make_sampler(sampling, custom), keys, BLOCK, progress))

    return _in_parts(lm, listed, keys, generate_on, beams.num_return_sequences)


def stream(
    lm: LM,
    prompts: Prompts,
    *,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    block: int | None = STREAM_BLOCK,
    **settings: Any,
) -> Iterator[Piece]:
    """Continue each prompt and yield its text in pieces.

    The concatenated pieces of a row are the text that `generate` returns. If the mesh has the devices of several processes,
    every process yields all pieces. After the first token, `block` tokens are generated per call; None: all tokens in one call.

    This function takes the arguments of `generate`, except `progress` and the fields of `BeamParams`.
    """
    check_for_text(lm)
    text, sampling = make_settings(with_defaults(lm.tokenizer, settings), TextParams, SamplingParams)
    block = 2**31 - 1 if block is None else as_int("block", block, 1, 2**31 - 1)
    request = read_request(lm, prompts, text)
    if not request.inputs:
        return iter(())
    keys = row_keys(key, len(request.inputs))
    pieces = decode(request, request.make_sampler(sampling, as_filters(filters)), keys, block)
    return (piece for piece, _ in pieces)


def decode(
    request: Request,
    sampler: Sampler,
    keys: jax.Array,
    block: int,
    progress: Callable[[int, int], None] | None = None,
    reuse: Reuse | None = None,
) -> Iterator[tuple[Piece, SamplerState]]:
    """Generate one token of each text, then `block` tokens per call, and yield the new pieces.

    Yields each piece with the current state, which later iterations may donate; if `block` covers all tokens, each text is one
    piece. With `reuse`, the only prompt continues an earlier text.
    """
    lm = request.lm
    params = lm.params
    texts = [request.text_stream(row) for row in range(len(keys))]
    longest = max(request.limits)

    # Read the prompts. If a text continues an earlier text, read only the tokens that the cache lacks.
    slots = None if reuse is None else reuse.size
    with request.on_device(slots=slots):
        if reuse is None:
            state = engine.start(sampler, params, request.inputs, keys, request.limits, row_ways(lm))
        else:
            state = resume(sampler, params, reuse, request.inputs[0], keys[0])
        state = block_on_mesh(lm, state)

    made = 0
    steps = block if block >= longest else 1  # a single token, so that the first piece is yielded early
    while any(text.finish_reason is None for text in texts):
        with request.on_device(slots=slots):
            state = engine.run(sampler, params, state, min(steps, longest - made))
            state = block_on_mesh(lm, state)
        fresh_BT = engine.new_ids(state, made)
        log_p_BT = engine.new_log_p(state, made)
        made = int(state.made)
        steps = block
        if progress:
            progress(min(made, longest), longest)

        for row, text in enumerate(texts):
            if text.finish_reason is not None:
                continue
            piece = text.add(fresh_BT[row].tolist(), log_p_BT[row].tolist())
            if text.finish_reason:
                yield Piece(row, piece, generation_of(text)), state
            elif piece:
                yield Piece(row, piece, None), state


def generations(pieces: Iterable[tuple[Piece, SamplerState]]) -> list[Generation]:
    """Return the complete texts of `decode`, in the order of their rows."""
    by_row = {piece.row: piece.done for piece, _ in pieces if piece.done}
    return [by_row[row] for row in sorted(by_row)]


def _in_parts(
    lm: LM,
    prompts: list[Any],
    keys: jax.Array,
    generate_on: Callable[[LM, list[Any], jax.Array], list[Generation]],
    sequences: int,
) -> list[Generation]:
    """Call a function on an equal share of the prompts in each part of the mesh; return the texts of all prompts.

    Args:
        lm: the model on the mesh.
        prompts: the prompts of all parts.
        keys: keys of all texts, the same number for each prompt.
        generate_on: a function from the model on a part of the mesh, prompts and keys to the texts.
        sequences: number of texts of each prompt.
    """
    part = own_part(lm)
    if part.count == 1:
        return generate_on(lm, prompts, keys)

    # All shares have the same number of prompts, so the last prompt may be repeated.
    n = len(prompts)
    share = math.ceil(n / part.count)
    first = part.index * share
    chosen = np.minimum(np.arange(first, first + share), n - 1)
    own_prompts = [prompts[number] for number in chosen]
    own_keys = keys.reshape(n, -1)[chosen].reshape(-1)

    def own_texts() -> list[Any]:
        # Return plain lists, because processes exchange JSON; the records are made again below.
        texts = generate_on(part.lm, own_prompts, own_keys)
        return [part.index, [tuple(text) for text in texts]]

    # The processes of a part have the same texts.
    by_part = dict(from_all(own_texts))
    texts = [Generation(*text) for index in range(part.count) for text in by_part[index]]
    return texts[: n * sequences]
