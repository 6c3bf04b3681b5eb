"""Conversations: render the messages, generate an answer, and keep the key/value cache for the next one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import MAX_TOKENS, SEED, SamplingParams, UserError
from jaxgpt.data.chat_template import ChatTemplate, Message, check_messages
from jaxgpt.data.special_tokens import TOKENS
from jaxgpt.decoding.sampler import Model, RowLimits, SamplerState, decode_steps
from jaxgpt.decoding.sampling import TokenBuffer
from jaxgpt.errors import as_int
from jaxgpt.lm.engine import bucket
from jaxgpt.lm.generation import STREAM_BLOCK, Generation, Piece, check_memory, memory_errors
from jaxgpt.lm.model import LM, check_lm, functions_of, placed, unstacked
from jaxgpt.lm.text import TextStream
from jaxgpt.model import KVCache
from jaxgpt.prompts import check_stop_ids, check_stops, row_keys

LONGEST = 512  # default maximum number of tokens of an answer
LEAST_SLOTS = 256  # initial size of a cache; it grows by doubling, and each size is compiled separately
CHUNK = 512  # maximum number of prompt tokens computed at once


def chat_template(lm: LM) -> ChatTemplate:
    """Return the chat template that came with a model.

    Raises:
        UserError: it has none.
    """
    check_lm(lm)
    known = lm.tokenizer.special.tokenizer
    source = known.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {one["name"]: one["template"] for one in source}.get("default")
    if source is None:
        raise UserError(
            f"{lm.source or 'the model'} has no chat template: import an instruction-tuned one, or continue "
            f"text with jaxgpt sample RUN --prompt TEXT"
        )
    return ChatTemplate(source, {name: known[name] for name in TOKENS if name in known})


def _room(lm: LM, prompt: int, max_new_tokens: int | None) -> int:
    """Return the maximum number of new tokens after a prompt of this length."""
    context = lm.config.model.block_size
    if prompt >= context:
        raise UserError(
            f"the conversation has {prompt:,} tokens, and the model's context is {context:,}: shorten it, or start a new "
            f"one (/reset in jaxgpt chat)"
        )
    longest = LONGEST if max_new_tokens is None else as_int("max-new-tokens", max_new_tokens, 1, MAX_TOKENS)
    return min(longest, context - prompt)


class PrefixCache:
    """Generate text after prompts with a common prefix, whose keys and values are computed once.

    Attributes:
        reused: number of tokens of the last prompt that were already cached.
    """

    def __init__(self, lm: LM) -> None:
        self._lm, self._model = unstacked(lm), functions_of(lm)
        self._ids: list[int] = []  # the tokens in the cache
        self._cache: KVCache | None = None
        self.reused = 0

    def generate(
        self,
        prompt: Sequence[int],
        limit: int,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        key: int | jax.Array,
        block: int,
    ) -> Generator[list[int], None, None]:
        """Yield new tokens, `block` at a time. They are the tokens that `jaxgpt.generate` returns.

        Args:
            prompt: ids of the whole text so far, at least one.
            limit: maximum number of new tokens; prompt and new tokens fit the context.
            sampling: how tokens are chosen.
            stop_ids: ids that end the text.
            key: a seed, or a `jax.random.key`.
            block: tokens generated between two yields.
        """
        lm, total = self._lm, len(prompt) + limit
        slots = bucket(total, LEAST_SLOTS, lm.config.model.block_size)
        check_memory(lm, 1, slots, limit)
        absorb, steps = _programs(self._model, sampling, stop_ids)
        rows = RowLimits(row_keys(key, 1, 1), jnp.asarray([limit], jnp.int32))
        with placed(lm, 1), memory_errors():
            kept, cache = self._take_cache(slots)
            slots = cache.size
            self.reused = done = min(_common(kept, prompt), len(prompt) - 1)
            while (left := len(prompt) - 1 - done) > 0:
                T = bucket(min(left, CHUNK), 8, min(CHUNK, slots - done))
                new = prompt[done : done + T][:left]
                ids_1T = np.zeros((1, T), np.int32)
                ids_1T[0, : len(new)] = new
                cache = absorb(lm.params, cache._replace(length=jnp.int32(done)), ids_1T, np.int32(len(new)))
                done += len(new)
            ids_1S = np.zeros((1, slots + 1), np.int32)
            ids_1S[0, : len(prompt)] = prompt
            text = TokenBuffer(jnp.asarray(ids_1S), jnp.zeros((1,), jnp.int32), jnp.int32(len(prompt)))
            state = SamplerState(text, cache._replace(length=jnp.int32(done)), jnp.zeros((1,), bool), jnp.int32(0))
        made = 0
        while made < limit:
            self._ids, self._cache = [], None  # donated to the next step
            with placed(lm, 1), memory_errors():
                state = steps(lm.params, state, rows, np.int32(min(block if made else 1, limit - made)))
                ids = np.array(state.text.ids_BS)[0, : int(state.text.length)].tolist()
            self._cache, self._ids = state.cache, ids[:-1]  # the last token is computed with the next one
            fresh = ids[len(prompt) + made :]
            if not fresh:
                return
            made += len(fresh)
            yield fresh

    def _take_cache(self, slots: int) -> tuple[list[int], KVCache]:
        """Take the cache, enlarged to at least this many slots, and its tokens out of the object.

        Both at once: an error before the cache is back must not leave tokens whose keys and values are gone.
        """
        ids, cache, self._ids, self._cache = self._ids, self._cache, [], None
        if cache is None:
            return [], self._model.cache(jnp.zeros((1,), jnp.int32), slots)
        more = slots - cache.size
        return ids, cache if more <= 0 else _grow(cache, more)


@partial(jax.jit, static_argnums=1)
def _grow(cache: KVCache, more: int) -> KVCache:
    def pad(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(4)])

    return cache._replace(k=tuple(pad(k_BKSH, 2) for k_BKSH in cache.k), v=tuple(pad(v_BKHS, 3) for v_BKHS in cache.v))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@lru_cache(maxsize=16)
def _programs(model: Model, sampling: SamplingParams, stop_ids: tuple[int, ...]) -> tuple[Any, Any]:
    def absorb(params: Any, cache: KVCache, ids_1T: jax.Array, count: jax.Array) -> KVCache:
        # Ids beyond `count` are padding: later tokens overwrite them, and no token attends to them before that.
        _, after = model.extend(params, ids_1T, cache, True)
        return after._replace(length=cache.length + count)  # type: ignore[no-any-return]

    steps = partial(decode_steps, model=model, sampling=sampling, stop_ids=stop_ids)
    return jax.jit(absorb, donate_argnums=1), jax.jit(steps, donate_argnums=1)


class Chat:
    """A conversation with a model. `answer` adds the user's message and streams the answer.

    Attributes:
        messages: so far: dicts with `role` and `content`.
        reused: number of tokens of the last prompt whose keys and values were kept from earlier turns.
        prompt_tokens: number of tokens of the last prompt.
    """

    def __init__(self, lm: LM, messages: Sequence[Message] = ()) -> None:
        """Start or continue a conversation.

        Args:
            lm: a model with a chat template.
            messages: `[{"role": "system", "content": "Be brief."}, ...]`.

        Raises:
            UserError: the model has no chat template, or the messages are malformed.
        """
        self._template = chat_template(lm)
        self._lm, self._prefix = lm, PrefixCache(lm)
        self.messages = check_messages(messages) if messages else []
        self.prompt_tokens = 0

    @property
    def reused(self) -> int:
        return self._prefix.reused

    def answer(
        self,
        text: str,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        stop: str | Sequence[str] = (),
        key: int | jax.Array = SEED,
    ) -> Generator[Piece, None, None]:
        """Answer a message; yield the answer in pieces, the last of which has `done` set.

        The message and the answer are added to `messages`. Closing the iterator early keeps the answer generated so far.

        Args:
            text: the user's message.
            max_new_tokens: maximum length of the answer; None: 512, or fewer where the context ends.
            sampling: how tokens are chosen.
            stop: strings that end the answer and are not part of it.
            key: a seed, or a `jax.random.key`.

        Raises:
            UserError: the conversation does not fit the context, the template refuses it, or an argument cannot work.
        """
        lm, messages = self._lm, [*self.messages, {"role": "user", "content": text}]
        ids = lm.tokenizer.encode_special(self._template.render(messages).text).tolist()
        limit = _room(lm, len(ids), max_new_tokens)
        stop_ids = check_stop_ids(lm.tokenizer, lm.config.model.vocab_size, ())
        stream = TextStream(
            lm.tokenizer.decode, limit, stop_ids, check_stops(lm.tokenizer, stop), byte_ids=lm.tokenizer.byte_ids
        )
        return self._pieces(messages, ids, limit, sampling, stop_ids, key, stream)

    def _pieces(
        self,
        messages: list[dict[str, Any]],
        ids: list[int],
        limit: int,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        key: int | jax.Array,
        stream: TextStream,
    ) -> Generator[Piece, None, None]:
        self.prompt_tokens = len(ids)
        blocks = self._prefix.generate(ids, limit, sampling, stop_ids, key, STREAM_BLOCK)
        failed = False
        try:
            for fresh in blocks:
                piece = stream.add(fresh)
                if stream.finish_reason:
                    break
                if piece:
                    yield Piece(0, piece, None)
            yield Piece(0, piece, Generation(stream.text, stream.ids, stream.finish_reason or "length"))
        except Exception:
            failed = True
            raise
        finally:
            blocks.close()
            if not failed:  # an answer that was closed or interrupted is kept
                self.messages = [*messages, {"role": "assistant", "content": stream.text}]


def chat(
    lm: LM,
    messages: Sequence[Message],
    *,
    max_new_tokens: int | None = None,
    temperature: float = SamplingParams.temperature,
    top_k: int = SamplingParams.top_k,
    top_p: float = SamplingParams.top_p,
    min_p: float = SamplingParams.min_p,
    repetition_penalty: float = SamplingParams.repetition_penalty,
    stop: str | Sequence[str] = (),
    key: int | jax.Array = SEED,
) -> Generation:
    """Answer the last message of a conversation.

    `chat(lm, [{"role": "user", "content": "Hi"}]).text`. For several turns, `jaxgpt.lm.Chat` keeps the key/value cache between
    them.

    Args:
        lm: a model with a chat template.
        messages: dicts with a `role` (system, user, assistant) and a `content`; the last one is the user's.
        max_new_tokens: maximum number of tokens of the answer; None: 512, or fewer where the context ends.
        temperature: divide the logits by this; 0 always takes the most probable token (greedy).
        top_k: keep the k most probable tokens; 0 disables.
        top_p: keep the smallest set of tokens with total probability >= p; 1 disables.
        min_p: drop tokens below min_p x the top probability; 0 disables.
        repetition_penalty: divide positive (multiply negative) logits of tokens in the text by this; 1 disables.
        stop: strings that end the answer and are not part of it; the model's own end tokens always end it.
        key: a seed, or a `jax.random.key`.

    Raises:
        UserError: the model has no chat template, the template refuses the messages, they do not fit the context, or another
            argument cannot work.
    """
    check_lm(lm)
    *before, last = check_messages(messages)
    if last["role"] != "user":
        raise UserError(f"the last message must have the role user, not {last['role']}: it is the one to be answered")
    sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty)
    pieces = Chat(lm, before).answer(
        last["content"], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, key=key
    )
    *_, end = pieces
    assert end.done is not None
    return end.done
