"""Requests: encoded prompts with the settings of their texts, and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.data.chat_encoding import stop_ids
from jaxgpt.decoding.sampler import Sampler
from jaxgpt.decoding.sampling import Filter
from jaxgpt.errors import UserError
from jaxgpt.lm import engine
from jaxgpt.lm.arguments import Prompts, as_prompts, encode_prompt, max_new, start_ids
from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import cache_shards, placed, row_ways
from jaxgpt.lm.sampler import for_decoding, sampler_of
from jaxgpt.lm.text import Decoder, TextStream
from jaxgpt.parallel.host import device_memory
from jaxgpt.settings import as_int


class Request(NamedTuple):
    """Encoded prompts and settings of the texts to generate."""

    lm: LM
    rows: list[list[int]]  # ids that the model reads; for an empty prompt, `start_ids`
    prompts: list[list[int]]  # ids decoded together with the new ids; [] for an empty prompt or a `Chat`
    new: list[int]  # maximum number of new tokens of each row
    params: TextParams  # length and stop settings; `stop_ids` includes the ids that end a text or a turn
    decoder: Decoder  # converts the ids to text; by default, the tokenizer

    def decoded_alone(self, decoder: Decoder) -> Request:
        """Return the request such that `decoder` converts the new ids to text without their prompts."""
        return self._replace(prompts=[[] for _ in self.prompts], decoder=decoder)

    def text(self, row: int) -> TextStream:
        """Return a new `TextStream` for a row."""
        params = self.params
        return TextStream(self.decoder, self.new[row], params.stop_ids, params.stop, prompt=self.prompts[row])

    def sampler(self, sampling: SamplingParams, filters: tuple[Filter, ...] = ()) -> Sampler:
        """Return a sampler with the model's filters (`only_text`), followed by `filters`."""
        params = self.params
        context = self.lm.config.model.block_size if params.overflow == "slide" else 0
        sampler = sampler_of(self.lm, sampling, params.stop_ids)
        return replace(sampler, filters=sampler.filters + filters, context=context, lookup=params.lookup)

    @contextmanager
    def on_device(self, copies: int = 1, size: int = 0) -> Iterator[None]:
        """Enter the mesh of the weights; raise `UserError` if `copies` caches do not fit in memory.

        The size is computed first, because XLA aborts the process on a CPU that cannot allocate the caches. `size` is the
        number of slots of a row; 0: the slots of a new text (`engine.buffer_sizes`).
        """
        sizes = engine.buffer_sizes(self.rows, self.new, row_ways(self.lm))
        rows = sizes.rows
        size = size or sizes.text
        shards, devices = cache_shards(self.lm, rows)
        memory = device_memory(devices)
        needed = copies * rows * self._row_bytes(size) / shards
        error = UserError(
            f"not enough memory: {copies * rows:,} rows of {size:,} tokens take {needed / 1e9:,.1f} GB besides the "
            f"weights, and a device has {memory / 1e9:,.0f} GB; lower max_new_tokens, num_beams or num_return_sequences, "
            f"or pass fewer prompts"
        )
        if needed > memory:
            raise error
        try:
            with placed(self.lm, rows):
                yield
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise error from None

    def _row_bytes(self, size: int) -> int:
        """Compute the bytes of a row of `size` slots: its cache and its int32 ids."""
        c = self.lm.config.model
        cached = size
        if self.params.overflow == "slide":
            cached = min(size, 2 * c.block_size)
        width = jnp.dtype(self.lm.config.train.compute_dtype).itemsize
        keys_and_values = 2 * c.n_layer * cached * c.kv_heads * c.head_width
        return keys_and_values * width + 4 * size


def read_request(lm: LM, prompts: Prompts, params: TextParams, sequences: int = 1) -> Request:
    """Encode each prompt `sequences` times, and check lengths, stop ids, stop strings and lookup."""
    lm = for_decoding(lm)
    model = lm.config.model
    tokenizer = lm.tokenizer

    # A row for each text; the model needs at least one id.
    encoded = [encode_prompt(tokenizer, model.vocab_size, prompt) for prompt in as_prompts(prompts)]
    encoded = [ids for ids in encoded for _ in range(sequences)]
    rows = [ids or start_ids(tokenizer) for ids in encoded]
    new = [max_new(model, len(ids), params) for ids in rows]

    if "" in params.stop:
        raise UserError("a stop string is empty: omit it")
    given = {as_int("a stop id", i, 0, model.vocab_size - 1) for i in params.stop_ids}
    ends = {i for i in stop_ids(tokenizer, lm.config.data) if i < model.vocab_size}
    if params.lookup and (len(rows) > 1 or params.overflow == "slide"):
        raise UserError(
            f"lookup {params.lookup} needs a single prompt, a single sequence, and no overflow slide: omit lookup, or "
            f"generate each text separately, without overflow slide"
        )
    params = replace(params, stop_ids=tuple(sorted(given | ends)))
    return Request(lm, rows, encoded, new, params, decoder=tokenizer)
