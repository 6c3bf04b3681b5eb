"""Beam search for a request: the most probable texts of each prompt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.config import BeamParams, SamplingParams, TextParams
from jaxgpt.decoding.beam import BeamSearch, Hypotheses
from jaxgpt.decoding.sampling import DIVERGED, Filter
from jaxgpt.errors import UserError
from jaxgpt.lm.buffers import buffer_sizes, left_pad
from jaxgpt.lm.engine import jitted
from jaxgpt.lm.placement import row_ways
from jaxgpt.lm.request import Request
from jaxgpt.lm.results import Generation
from jaxgpt.parallel.arrays import to_host

# Settings that have no effect in beam search; values other than the default are rejected, except overflow "error".
BEAMS_REJECT = ("temperature", "top_k", "top_p", "min_p", "lookup", "stop", "overflow")


class _Beam(NamedTuple):
    """A finished sequence of beam search.

    Attributes:
        ids: the new ids, including a stop id.
        score: `log p / length ** length_penalty`; NaN if a logit is NaN.
    """

    ids: list[int]
    score: float


def beam_search(
    request: Request, sampling: SamplingParams, filters: tuple[Filter, ...], beams: BeamParams
) -> list[Generation]:
    """Generate the best texts of a beam search, `num_return_sequences` for each prompt.

    Raises:
        UserError: if a setting has no effect in beam search, there are too many beams or too few texts, memory is insufficient,
            or a logit is NaN.
    """
    _check_settings(request, sampling, beams)
    found = _search(request, sampling, filters, beams)

    wanted = beams.num_return_sequences
    texts = []
    for row, sequences in enumerate(found):
        best = sequences[:wanted]
        if any(math.isnan(sequence.score) for sequence in best):
            raise UserError(DIVERGED)
        if len(best) < wanted:
            raise UserError(
                f"prompt {row + 1} has only {len(best)} of {wanted} texts: raise no_repeat_ngram_size, let filters keep more "
                f"tokens, or lower num_return_sequences"
            )
        for sequence in best:
            text = request.text_stream(row)
            text.add(sequence.ids)
            texts.append(Generation(text.text, text.ids, text.finish_reason or "length", sequence.score))
    return texts


def _check_settings(request: Request, sampling: SamplingParams, beams: BeamParams) -> None:
    """Raise `UserError` if a setting has no effect in beam search, or there are too many beams."""
    given = vars(sampling) | vars(request.settings)
    default = vars(SamplingParams()) | vars(TextParams())
    for name in BEAMS_REJECT:
        if given[name] not in (default[name], "error"):  # beam search supports overflow "error"
            raise UserError(f"{name} {given[name]} has no effect in beam search: omit it, or set num_beams to 1")
    W = beams.num_beams
    V = request.lm.config.model.vocab_size
    if W * V >= 2**31:
        raise UserError(f"num_beams {W} is too many for a vocabulary of {V}: use at most {2**31 // V}")


def _search(
    request: Request, sampling: SamplingParams, filters: tuple[Filter, ...], beams: BeamParams
) -> list[list[_Beam]]:
    """Run the search; return the finished sequences of each prompt, best first."""
    sizes = buffer_sizes(request.inputs, request.limits, row_ways(request.lm))
    text = left_pad(request.inputs, sizes)
    padding_rows = sizes.rows - len(request.limits)
    limit_B = np.pad(np.asarray(request.limits, np.int32), (0, padding_rows))

    with request.on_device(2 * beams.num_beams):  # twice the beams, because reordering copies their caches
        sampler = request.make_sampler(replace(sampling, temperature=1.0), filters)
        search = jitted(BeamSearch.run, BeamSearch(sampler, beams, sizes.text))
        found: Hypotheses = jax.tree.map(to_host, search(request.lm.params, text, limit_B))

    P = sizes.prompt
    of_prompts = []
    for row in range(len(request.inputs)):
        sequences = []
        for ids_S, length, score in zip(found.ids_BWS[row], found.length_BW[row], found.score_BW[row], strict=True):
            if length:
                sequences.append(_Beam(ids_S[P : P + length].tolist(), float(score)))
        of_prompts.append(sequences)
    return of_prompts
