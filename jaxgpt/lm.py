"""A trained model in the hand: load it, ask it for text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import Config, ModelConfig, UserError
from jaxgpt.data import Tokenizer
from jaxgpt.decoding import Beams, History, Model, Policy, Session, TextStream, search
from jaxgpt.decoding.explain import Choice
from jaxgpt.decoding.explain import explain as explain_choice
from jaxgpt.model import GPT, KVCache, init_cache
from jaxgpt.model.weights import Precision, lower
from jaxgpt.parallel import on_mesh
from jaxgpt.prompts import check_room, check_stops, encode_prompt, limits
from jaxgpt.train.build import abstract_params
from jaxgpt.train.checkpoint import read_params
from jaxgpt.train.run import open_run

STREAM_BLOCK = 4  # tokens between looks at what was made, where someone reads along
STOP_BLOCK = 32  # where stop strings are looked for


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
        ids: the new ids, without those that ended the text.
        finish_reason: `stop` where an end token, a stop id or a stop string came, `length` where the number of tokens was
            reached.
        score: of a beam, `log p / length ** length_penalty`; None where tokens were drawn.
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


def load(path: str | Path, checkpoint: str = "best", weights: Precision = "float32") -> LM:
    """Read a run directory.

    Args:
        path: what `jaxgpt train` wrote.
        checkpoint: `best` (lowest validation loss), `last`, or a step.
        weights: the precision in which matrices are kept.

    Raises:
        UserError: no run, or no such checkpoint.
    """
    run = open_run(Path(path))
    config = run.config()
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract_params(config.model)
    )
    params = read_params(run.checkpoints, checkpoint, abstract, ema=config.optim.ema_decay > 0)
    return LM(config, lower(params, weights), run.tokenizer())


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
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    check_stops(lm.tokenizer, stops)
    ends = _stop_ids(lm, stop_ids)
    rows, new = _rows(lm, prompts, max_new_tokens, max_length, beyond)
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
        model=model_functions(lm.config.model, lm.config.train.compute_dtype),
        policy=policy,
        stop_ids=ends,
        context=lm.config.model.block_size,
        slide=slide,
    )
    texts = [TextStream(lm.tokenizer.decode, n, ends, stops) for n in new]
    while going := [row for row, text in enumerate(texts) if text.finish_reason is None]:
        with _placed(lm):
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
    stop_ids: Sequence[int] = (),
    **others: Any,
) -> list[Generation]:
    if others:
        raise UserError(f"{min(others).replace('_', '-')} has no part in beam search (num-beams {beams.num_beams})")
    policy = Policy(repetition_penalty=repetition_penalty, no_repeat_ngram_size=no_repeat_ngram_size)
    ends = _stop_ids(lm, stop_ids)
    rows, new = _rows(lm, prompts, max_new_tokens, max_length, "error")
    if not rows:
        return []
    model = model_functions(lm.config.model, lm.config.train.compute_dtype)
    with _placed(lm):
        found = search(lm.params, rows, new, model, policy, beams, ends, lm.config.model.block_size)
    out = []
    for row in range(len(rows)):
        for beam in range(beams.num_return_sequences):
            ids = found.ids_BWn[row, beam, : found.length_BW[row, beam]].tolist()
            ended = bool(ids) and ids[-1] in ends
            ids = ids[:-1] if ended else ids
            score = float(found.score_BW[row, beam])
            out.append(Generation(lm.tokenizer.decode(ids), ids, "stop" if ended else "length", score))
    return out


@lru_cache(maxsize=16)
def model_functions(config: ModelConfig, dtype: str) -> Model:
    """The model as decoding takes it; for the same model the same functions, so that compiled programs are found again."""
    model = GPT(config, dtype=jnp.dtype(dtype))

    def extend(params: Any, tokens_BT: jax.Array, cache: KVCache, last: bool) -> tuple[jax.Array, KVCache]:
        extended: Any = model.apply({"params": params}, tokens_BT, cache, last, method="extend")
        return extended

    return Model(extend, lambda start_B, size: init_cache(config, start_B, size, model.dtype))


def _placed(lm: LM) -> AbstractContextManager[None]:
    """The mesh on which the weights are, where there is more than one device to it."""
    sharding = getattr(jax.tree.leaves(lm.params)[0], "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
        return on_mesh(sharding.mesh, lm.config.model)  # type: ignore[arg-type]
    return nullcontext()


def _rows(
    lm: LM,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int | None,
    max_length: int | None,
    beyond: str,
) -> tuple[list[list[int]], list[int]]:
    if beyond not in ("error", "slide"):
        raise UserError(f"beyond must be error or slide, not {beyond!r}")
    model = lm.config.model
    rows = [encode_prompt(lm.tokenizer, model.vocab_size, prompt) for prompt in prompts]
    new = limits(rows, max_new_tokens, max_length)
    if beyond == "slide":
        return [ids[-model.block_size :] for ids in rows], new
    check_room(model, rows, new)
    return rows, new


def _stop_ids(lm: LM, stop_ids: Sequence[int]) -> tuple[int, ...]:
    eos = lm.tokenizer.eos_id
    for i in stop_ids:
        if not 0 <= i < lm.config.model.vocab_size:
            raise UserError(f"stop id {i}: the vocabulary has {lm.config.model.vocab_size}")
    return tuple(sorted({*stop_ids} | ({eos} if eos is not None else set())))


def explain(lm: LM, prompt: str | Sequence[int], policy: Policy, key: jax.Array) -> Choice:
    """How the token after a prompt is chosen: every rule's effect, the random number, the token.

    Args:
        lm: the model.
        prompt: string, or ids.
        policy: the rules.
        key: of the row; `generate` gives row i `jax.random.fold_in(its key, i)`.

    Raises:
        UserError: no ids for the prompt, or more than the context holds.
    """
    [ids], _ = _rows(lm, [prompt], 1, None, "error")
    model = model_functions(lm.config.model, lm.config.train.compute_dtype)
    history = History(jnp.array([ids], jnp.int32), jnp.zeros((1,), jnp.int32), jnp.int32(len(ids)))
    with _placed(lm):
        logits_11V, _ = model.extend(lm.params, history.ids_BS, model.cache(history.start_B, len(ids)), True)
    return explain_choice(logits_11V[:, -1], history, policy, key)
