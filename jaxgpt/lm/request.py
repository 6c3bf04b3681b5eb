"""Requests: encoded prompts with the settings of their texts, and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.data.chat import encoding
from jaxgpt.decoding.sampler import Sampler
from jaxgpt.decoding.sampling import Filter
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import Prompts, as_prompts, encode_prompt, max_new, start_ids
from jaxgpt.lm.buffers import buffer_sizes
from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import cache_shards, device_count, row_ways, use_mesh_of
from jaxgpt.lm.sampler import for_decoding, sampler_of
from jaxgpt.lm.text import Decoder, TextStream
from jaxgpt.out_of_memory import is_out_of_device_memory
from jaxgpt.parallel.host import device_memory
from jaxgpt.settings import as_int


class CacheMemory(NamedTuple):
    """The memory of the caches of a batch.

    Attributes:
        rows: number of cached rows, including copies.
        slots: number of slots of a row.
        needed: bytes of the rows on one device.
        available: bytes of the memory of a device.
    """

    rows: int
    slots: int
    needed: float
    available: int

    def check(self) -> None:
        """Raise `UserError` if the caches do not fit in memory."""
        if self.needed > self.available:
            raise self._error()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replace an XLA error for exhausted device memory with a `UserError`."""
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            if not is_out_of_device_memory(e):
                raise
            raise self._error() from None

    def _error(self) -> UserError:
        return UserError(
            f"not enough memory: {self.rows:,} rows of {self.slots:,} tokens take {self.needed / 1e9:,.1f} GB besides the "
            f"weights, and a device has {self.available / 1e9:,.0f} GB; lower max_new_tokens, num_beams or "
            f"num_return_sequences, or pass fewer prompts"
        )


class Request(NamedTuple):
    """Encoded prompts and settings of the texts to generate.

    Attributes:
        lm: the model, prepared for decoding (`for_decoding`).
        inputs: ids that the model reads before each text; for an empty prompt, `start_ids`.
        prefixes: ids of each prompt that are decoded together with the new ids of its text; [] for an empty prompt, and
            after `decoded_alone`.
        limits: maximum number of new tokens of each text.
        settings: length and stop settings; `settings.stop_ids` includes the ids that end a text or a turn.
        decoder: converts ids to text; by default, the tokenizer.
    """

    lm: LM
    inputs: list[list[int]]
    prefixes: list[list[int]]
    limits: list[int]
    settings: TextParams
    decoder: Decoder

    def decoded_alone(self, decoder: Decoder) -> Request:
        """Return the request such that `decoder` converts the new ids to text without their prompts."""
        return self._replace(prefixes=[[] for _ in self.prefixes], decoder=decoder)

    def text_stream(self, row: int) -> TextStream:
        """Return a new `TextStream` for a row."""
        settings = self.settings
        return TextStream(self.decoder, self.limits[row], settings.stop_ids, settings.stop, prompt=self.prefixes[row])

    def make_sampler(self, sampling: SamplingParams, filters: tuple[Filter, ...] = ()) -> Sampler:
        """Return a sampler with the model's filters (`only_text`), followed by `filters`."""
        settings = self.settings
        context = self.lm.config.model.block_size if settings.overflow == "slide" else 0
        of_model = sampler_of(self.lm, sampling, settings.stop_ids)
        return replace(of_model, filters=of_model.filters + filters, context=context, lookup=settings.lookup)

    @contextmanager
    def on_device(self, copies: int = 1, slots: int | None = None) -> Iterator[None]:
        """Enter the mesh of the weights; raise `UserError` if `copies` caches of each row do not fit in memory.

        Args:
            copies: number of caches of each row.
            slots: number of slots of a row; None: the slots of a new text (`buffer_sizes`).
        """
        sizes = buffer_sizes(self.inputs, self.limits, row_ways(self.lm))
        memory = self._memory(sizes.rows, copies, slots or sizes.text)
        memory.check()  # before any allocation, because XLA aborts the process on a CPU that cannot allocate the caches
        with memory.explained(), use_mesh_of(self.lm, sizes.rows):
            yield

    def _memory(self, rows: int, copies: int, slots: int) -> CacheMemory:
        """Compute the memory of `copies` caches of each of `rows` rows."""
        copied_rows = copies * rows
        return CacheMemory(
            rows=copied_rows,
            slots=slots,
            needed=copied_rows * self._row_bytes(slots) / cache_shards(self.lm, rows),
            available=device_memory(device_count(self.lm)),
        )

    def _row_bytes(self, slots: int) -> int:
        """Compute the bytes of a row: its cache with positions, and its ids with their log probabilities."""
        model = self.lm.config.model
        cached = slots
        if self.settings.overflow == "slide":
            cached = min(slots, 2 * model.block_size)
        width = jnp.dtype(self.lm.config.train.compute_dtype).itemsize
        keys_and_values = 2 * model.n_layer * model.kv_heads * model.head_width * width
        position, token, log_p = 4, 4, 4
        return cached * (keys_and_values + position) + slots * (token + log_p)


def read_request(lm: LM, prompts: Prompts, settings: TextParams, sequences: int = 1) -> Request:
    """Encode each prompt for `sequences` texts, and check lengths, stop ids, stop strings and lookup.

    Raises:
        UserError: if a prompt or a setting is invalid, a text exceeds the context, or `lm` is not an LM.
    """
    lm = for_decoding(lm)
    model = lm.config.model
    tokenizer = lm.tokenizer

    # One input for each text; the model needs at least one id.
    encoded = [encode_prompt(tokenizer, model.vocab_size, prompt) for prompt in as_prompts(prompts)]
    encoded = [ids for ids in encoded for _ in range(sequences)]
    inputs = [ids or start_ids(tokenizer) for ids in encoded]
    limits = [max_new(model, len(ids), settings) for ids in inputs]

    if "" in settings.stop:
        raise UserError("a stop string is empty: omit it")
    given = {as_int("a stop id", i, 0, model.vocab_size - 1) for i in settings.stop_ids}
    ends = {i for i in encoding.stop_ids(tokenizer, lm.config.data) if i < model.vocab_size}
    if settings.lookup and (len(inputs) > 1 or settings.overflow == "slide"):
        raise UserError(
            f"lookup {settings.lookup} needs a single prompt, a single sequence, and no overflow slide: omit lookup, or "
            f"generate each text separately, without overflow slide"
        )
    settings = replace(settings, stop_ids=tuple(sorted(given | ends)))
    return Request(
        lm=lm,
        inputs=inputs,
        prefixes=encoded,
        limits=limits,
        settings=settings,
        decoder=tokenizer,
    )
