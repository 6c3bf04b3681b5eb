"""A trained model in the hand: load it, ask it for text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Config, UserError
from jaxgpt.data import Tokenizer
from jaxgpt.decoding import Policy, sample
from jaxgpt.model import GPT, KVCache, init_cache
from jaxgpt.train.build import abstract_params
from jaxgpt.train.checkpoint import choose, restore_params
from jaxgpt.train.run import open_run


class LM(NamedTuple):
    """A model ready for use.

    Attributes:
        config: of the run it comes from.
        params: the weights, or their average where the run kept one.
        tokenizer: between text and ids.
    """

    config: Config
    params: Any
    tokenizer: Tokenizer


class Generation(NamedTuple):
    """What was generated after one prompt.

    Attributes:
        text: the new text.
        ids: the new ids, without the one that ended the text.
        finish_reason: `stop` where an end token came, `length` where the number of tokens was reached.
    """

    text: str
    ids: list[int]
    finish_reason: Literal["stop", "length"]


def load(path: str | Path, checkpoint: str = "best") -> LM:
    """Read a run directory.

    Args:
        path: what `jaxgpt train` wrote.
        checkpoint: `best` (lowest validation loss), `last`, or a step.

    Raises:
        UserError: no run, or no such checkpoint.
    """
    run = open_run(Path(path))
    config = run.config()
    step = choose(run.checkpoints, checkpoint)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract_params(config.model)
    )
    params = restore_params(run.checkpoints, step, abstract, ema=config.optim.ema_decay > 0)
    return LM(config, params, run.tokenizer())


def generate(
    lm: LM,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    key: jax.Array | None = None,
) -> list[Generation]:
    """Continue each prompt. Prompts may differ in length; each row is drawn with a key of its own.

    Args:
        lm: the model.
        prompts: strings, or ids.
        max_new_tokens: at most so many; an end token ends a row before.
        temperature: logits are divided by it; 0: always the likeliest.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together reach this probability; 1: all.
        key: of the draws; None: `jax.random.key(0)`.

    Raises:
        UserError: no ids for a prompt, ids beyond the vocabulary, or more tokens than the context holds.
    """
    policy = Policy(temperature, top_k, top_p)
    rows = [encode_prompt(lm, prompt) for prompt in prompts]
    if not rows:
        return []
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be at least 1, not {max_new_tokens}")
    longest = max(map(len, rows))
    _check_room(lm, longest, max_new_tokens)
    prompt_BT = np.zeros((len(rows), longest), np.int32)
    for row, ids in zip(prompt_BT, rows, strict=True):
        row[longest - len(ids) :] = ids
    start_B = np.array([longest - len(ids) for ids in rows], np.int32)
    key = jax.random.key(0) if key is None else key
    key_B = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(rows)))

    eos = lm.tokenizer.eos_id
    run = _compiled(lm.config, policy, max_new_tokens, () if eos is None else (eos,))
    out_Bn = np.asarray(run(lm.params, prompt_BT, start_B, key_B))
    return [_finish(lm.tokenizer, row.tolist(), eos) for row in out_Bn]


def encode_prompt(lm: LM, prompt: str | Sequence[int]) -> list[int]:
    """Ids of a prompt. An empty text begins where texts begin: after an end token, or after a new line."""
    if isinstance(prompt, str):
        ids = lm.tokenizer.encode(prompt).tolist()
        if not ids:
            if lm.tokenizer.eos_id is not None:
                ids = [lm.tokenizer.eos_id]
            else:
                try:
                    ids = lm.tokenizer.encode("\n").tolist()
                except UserError:
                    raise UserError("the prompt is empty, and this tokenizer has no sign for a beginning") from None
    else:
        ids = [int(i) for i in prompt]
    if not ids:
        raise UserError("the prompt is empty")
    for place, i in enumerate(ids):
        if not 0 <= i < lm.config.model.vocab_size:
            raise UserError(
                f"id {i} at position {place} of the prompt: the vocabulary has {lm.config.model.vocab_size}"
            )
    return ids


@lru_cache(maxsize=32)
def _compiled(config: Config, policy: Policy, n: int, stop_ids: tuple[int, ...]) -> Any:
    model = GPT(config.model, dtype=jnp.dtype(config.train.compute_dtype))

    def extend_fn(params: Any, tokens_BT: jax.Array, cache: KVCache, last: bool) -> tuple[jax.Array, KVCache]:
        extended: Any = model.apply({"params": params}, tokens_BT, cache, last, method="extend")
        return extended

    def run(params: Any, prompt_BT: jax.Array, start_B: jax.Array, key_B: jax.Array) -> jax.Array:
        cache = init_cache(config.model, start_B, prompt_BT.shape[1] + n - 1, model.dtype)
        return sample(params, prompt_BT, cache, key_B, extend_fn=extend_fn, policy=policy, n=n, stop_ids=stop_ids)

    return jax.jit(run)


def _check_room(lm: LM, prompt: int, new: int) -> None:
    room = lm.config.model.block_size
    if prompt + new - 1 > room and lm.config.model.positions != "rope":
        raise UserError(
            f"a prompt of {prompt} tokens and {new} new ones do not fit the context of {room}: "
            f"at most {max(room - prompt + 1, 0)} can be generated"
        )


def _finish(tokenizer: Tokenizer, ids: list[int], eos: int | None) -> Generation:
    ended = eos is not None and eos in ids
    ids = ids[: ids.index(eos)] if ended else ids  # type: ignore[arg-type]
    return Generation(tokenizer.decode(ids), ids, "stop" if ended else "length")
