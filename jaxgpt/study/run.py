"""Read and edit activations by name: in a forward pass, and in generation with a cache.

The model passes each named activation to `ops.edit` and uses the array that it returns. Here, `ops.edit` is an `Observer`,
which applies edits and collects taps. Without any, it is None, and the compiled program equals the program of `GPT.apply`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SEED, Config, ModelConfig, SamplingParams, TextParams
from jaxgpt.decoding import TokenBuffer, sample_token
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.kernels.stored import dequantize
from jaxgpt.lm import LM, Generation
from jaxgpt.lm.arguments import encode_prompt, make_settings, row_keys
from jaxgpt.lm.generation import read_request
from jaxgpt.lm.model import check_lm, ids_with_text, only_text, placed, unstacked
from jaxgpt.model import GPT
from jaxgpt.model.scan import STACKED, unstack_layers
from jaxgpt.ops import Ops

Result = TypeVar("Result")
Taps = tuple[str, ...]
Edit = Callable[[jax.Array], Any]
Edits = tuple[tuple[str, Edit], ...]


class ForwardPass(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: `[B, T, V]`, float32.
        taps: the requested activations by name, after their edits.
    """

    logits: jax.Array
    taps: dict[str, jax.Array]


def names(lm: LM, shape: tuple[int, int] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """List the activations of a model in the order in which they are computed, with shapes and dtypes.

    Args:
        lm: the model.
        shape: batch and length `(B, T)` of the ids; None: one row of the context length.
    """
    check_lm(lm)
    ordered: list[str] = []

    def trace(params: Any, tokens_BT: jax.Array) -> dict[str, jax.Array]:
        taps = forward(lm.config, params, tokens_BT, ("*",)).taps
        ordered.extend(taps)
        return taps

    tokens = jax.ShapeDtypeStruct(shape or (1, lm.config.model.block_size), jnp.int32)
    shapes = jax.eval_shape(trace, lm.params, tokens)
    return {name: shapes[name] for name in ordered}


def run(lm: LM, ids: Any, taps: Sequence[str] = (), edits: Mapping[str, Edit] | None = None) -> ForwardPass:
    """Compute logits and activations in one forward pass, with edits of activations.

    An edit is a pure function of an activation, traced with the model: `{"h.3.mlp.out": lambda x: 0 * x}`. Attention is the
    reference implementation, which names its scores and pattern. The result is differentiable, including with respect to
    arrays that an edit closes over, and `run` can be called under `jax.vmap`, `jax.grad` and `jax.jit`. Programs are cached by
    the identity of the edits: define each edit once, or call `run` in a jitted function of the values that change.

    Args:
        lm: the model. Quantized weights are converted to float32 arrays of the same values, and stacked ones are unstacked.
        ids: a text, or ids: an integer array `[B, T]` or nested lists.
        taps: names of activations to return, as `names(lm)` lists them; `*` matches any part of a name: `h.*.attn.pattern`.
        edits: functions by name, which may also contain `*`.

    Raises:
        UserError: if there is no such name, an edit changes a shape or dtype, or the ids are outside the vocabulary or longer
            than the context length.
    """
    observed = _check_observed(taps, edits)
    out = on_tokens(_forward, lm, ids, *observed)
    return out._replace(taps=_ordered(observed[0], out.taps))


class Captured(NamedTuple):
    """Logits and activations of one forward pass, named as in transformers.

    Attributes:
        logits: `[B, T, V]`.
        hidden: L + 1 arrays `[B, T, D]`: the input of the first block, then the output of each block, the last one after the
            final norm. The same as transformers' `output_hidden_states`.
        attentions: L arrays `[B, N, T, T]`, float32: rows sum to 1 and are 0 above the diagonal.
    """

    logits: jax.Array
    hidden: tuple[jax.Array, ...]
    attentions: tuple[jax.Array, ...]


def capture(lm: LM, ids: Any) -> Captured:
    """Compute logits, hidden states and attention maps in one forward pass.

    Args:
        lm: the model.
        ids: a text, or ids `[B, T]`.

    Raises:
        UserError: as `run`.
    """
    check_lm(lm)
    hidden, attentions = hidden_names(lm.config.model), layer_names(lm.config.model, "attn.pattern")
    logits, taps = run(lm, ids, [*hidden, *attentions])
    return Captured(logits, tuple(taps[name] for name in hidden), tuple(taps[name] for name in attentions))


def layer_names(config: ModelConfig, activation: str) -> list[str]:
    """Return the names of an activation in all layers, such as `resid.pre` or `attn.pattern`."""
    in_stream = activation.startswith("resid.")
    return [f"{activation}.{layer}" if in_stream else f"h.{layer}.{activation}" for layer in range(config.n_layer)]


def stream_names(config: ModelConfig) -> list[str]:
    """Return the names of the residual stream: the input of each block, then the output of the last one."""
    return [*layer_names(config, "resid.pre"), f"resid.post.{config.n_layer - 1}"]


def hidden_names(config: ModelConfig) -> list[str]:
    """Return the names of the hidden states that `capture` returns."""
    *inputs, last = stream_names(config)
    return [*inputs, "ln_f.out" if config.final_norm and config.norm != "none" else last]


class Generated(NamedTuple):
    """A generated text with its activations.

    Attributes:
        ids: the ids of the prompt and of the generated text.
        generation: as `jaxgpt.generate` returns it.
        logits: `[1, T, V]`, at each of the ids; without RoPE, the last id is omitted if it exceeds the context length.
        taps: the requested activations by name, at the same ids, computed with the cache.
    """

    ids: list[int]
    generation: Generation
    logits: jax.Array
    taps: dict[str, jax.Array]


def generate(
    lm: LM,
    prompt: str | Sequence[int],
    taps: Sequence[str] = (),
    edits: Mapping[str, Edit] | None = None,
    *,
    key: int | jax.Array = SEED,
    **settings: Any,
) -> Generated:
    """Continue a prompt with a KV cache, with edits of activations, and return activations.

    The edits apply to the prompt in one pass, then to each new token: their arrays have the positions of the prompt, then one.

    Args:
        lm: the model.
        prompt: a text or ids.
        taps: names of activations to return, as for `run`.
        edits: functions by name, as for `run`.
        key: a seed or a `jax.random.key`.
        **settings: fields of `TextParams` and `SamplingParams`, as for `jaxgpt.generate`.

    Raises:
        UserError: as `jaxgpt.generate`, or as `run` for taps and edits.
    """
    lm, observed = unstacked(lm), _check_observed(taps, edits)
    params, sampling = make_settings(settings, TextParams, SamplingParams)
    if params.overflow == "slide":
        raise UserError("overflow slide recomputes the activations of the text at each step: use auto or error")
    request = read_request(lm, [prompt], params)
    [row], [new], model = request.rows, request.new, lm.config.model
    prompt_1P, key_1, has_text = jnp.asarray([row], jnp.int32), row_keys(key, 1, 1), ids_with_text(lm)
    with placed(lm, 1):
        new_ids, out = _generate(lm.config, lm.params, prompt_1P, key_1, new, sampling, has_text, *observed)
    text = request.text(0)
    text.add(new_ids.tolist())
    assert text.finish_reason is not None
    ids = row + text.ids
    read = len(ids) if model.positions == "rope" else min(len(ids), model.block_size)
    taken = {name: x[:, :, :read, :read] if _by_key(name) else x[:, :read] for name, x in out.taps.items()}
    generation = Generation(text.text, text.ids, text.finish_reason)
    return Generated(ids, generation, out.logits[:, :read], _ordered(observed[0], taken))


def on_tokens(compute: Callable[..., Result], lm: LM, ids: Any, *args: Any) -> Result:
    """Return `compute(config, params, tokens_BT, *args)` for a text or ids, on the devices of the model.

    Raises:
        UserError: if the ids have a different shape, or are outside the vocabulary or longer than the context length.
    """
    tokens_BT = as_tokens(lm, ids)
    with placed(lm, len(tokens_BT)):
        return compute(lm.config, lm.params, tokens_BT, *args)


def forward(config: Config, params: Any, tokens_BT: jax.Array, taps: Taps = (), edits: Edits = ()) -> ForwardPass:
    """Run the model with an observer; `run` without checks and without jit."""
    # The digits of an int8 product are rounded, so its gradient would be wrong.
    params = dequantize(unstack_layers(params, config.model.n_layer) if STACKED in params else params)
    observer = Observer(edits, taps)
    logits_BTV: Any = GPT(config.model, _ops(config, observer)).apply({"params": params}, tokens_BT)
    return ForwardPass(logits_BTV, observer.results())


_forward = jax.jit(forward, static_argnums=(0, 3, 4))


@partial(jax.jit, static_argnums=(0, 4, 5, 6, 7, 8))
def _generate(
    config: Config,
    params: Any,
    prompt_1P: jax.Array,
    key_1: jax.Array,
    new: int,
    sampling: SamplingParams,
    has_text: bytes,
    taps: Taps,
    edits: Edits,
) -> tuple[jax.Array, ForwardPass]:
    """Sample `new` tokens, regardless of end tokens; return their ids, and the activations of prompt and new tokens."""
    P = prompt_1P.shape[1]
    slots = P + new

    def call(method: str, *args: Any) -> tuple[Any, ForwardPass]:
        observer = Observer(edits, taps)
        model = GPT(config.model, _ops(config, observer))
        logits, cache = model.apply({"params": params}, *args, method=method)
        return cache, ForwardPass(logits, observer.results())  # type: ignore[arg-type]

    def step(state: Any, made: jax.Array) -> Any:
        text, cache, logits_1V = state
        token_1, _ = sample_token(only_text(logits_1V[:, None], has_text)[:, 0], text, key_1, made, sampling)
        cache, out = call("extend", token_1[:, None], cache)
        return (text.append(token_1[:, None]), cache, out.logits[:, -1]), out

    def join(path: Any, first: jax.Array, steps: jax.Array) -> jax.Array:
        """Append the steps, which the scan stacked along a new first axis, to the axis of the queries."""
        name, axis = str(getattr(path[-1], "key", "")), 1
        if _by_key(name):  # the prompt attends to itself, later tokens to all slots of the cache
            axis, masked = 2, jnp.finfo(first.dtype).min if name.endswith(".scores") else 0
            first = jnp.pad(first, ((0, 0),) * 3 + ((0, new),), constant_values=masked)
        return jnp.concatenate([first, jnp.moveaxis(jnp.squeeze(steps, axis + 1), 0, axis)], axis)

    cache, first = call("prefill", prompt_1P, jnp.arange(P)[None], slots)
    text = TokenBuffer(jnp.pad(prompt_1P, ((0, 0), (0, new))), jnp.zeros(1, jnp.int32), jnp.int32(P))
    begin: Any = (text, cache, first.logits[:, -1])
    (text, *_), steps = jax.lax.scan(step, begin, jnp.arange(new))
    return text.ids_BS[0, P:], jax.tree_util.tree_map_with_path(join, first, steps)


def _by_key(name: str) -> bool:
    """Return whether an activation has an axis of keys: `[B, N, T, S]`."""
    return name.endswith((".scores", ".pattern"))


@dataclass(frozen=True)
class Observer:
    """An `ops.edit` that applies edits and collects taps while the model is traced. Compares by its edits and taps.

    Attributes:
        edits: functions by name.
        taps: names of activations to collect.
        taken: the collected activations by name.
        seen: names of all activations.
    """

    edits: Edits = ()
    taps: Taps = ()
    taken: dict[str, jax.Array] = field(default_factory=dict, compare=False)
    seen: list[str] = field(default_factory=list, compare=False)

    def __call__(self, path: str, x: jax.Array) -> jax.Array:
        """Return the activation after its edits."""
        # `h.3.attn.q` for q in h_3/attn, `resid.pre.3` for resid.pre in h_3
        name = re.sub(r"^h_(\d+)\.", r"h.\1.", path.replace("/", "."))
        name = re.sub(r"^h\.(\d+)\.(resid\.\w+)$", r"\2.\1", name)
        self.seen.append(name)
        for wanted, edit in self.edits:
            x = _apply(name, edit, x) if fnmatchcase(name, wanted) else x
        if any(fnmatchcase(name, wanted) for wanted in self.taps):
            self.taken[name] = x
        return x

    def results(self) -> dict[str, jax.Array]:
        """Return the taps.

        Raises:
            UserError: if a name matches no activation.
        """
        for wanted in (*self.taps, *(name for name, _ in self.edits)):
            if not any(fnmatchcase(name, wanted) for name in self.seen):
                near = did_you_mean(wanted, self.seen)
                raise UserError(f"no activation {short_repr(wanted)}{near}: jaxgpt.study.names(lm) lists them")
        return self.taken


def _ops(config: Config, observer: Observer) -> Ops:
    """Return the definitions, which name all activations, with an observer if it has anything to do."""
    return Ops(jnp.dtype(config.train.compute_dtype), edit=observer if observer.edits or observer.taps else None)


def _apply(name: str, edit: Edit, x: jax.Array) -> jax.Array:
    y = edit(x)
    returned = f"{y.dtype} {list(y.shape)}" if hasattr(y, "shape") and hasattr(y, "dtype") else short_repr(y)
    if returned != (wanted := f"{x.dtype} {list(x.shape)}"):
        raise UserError(f"the edit of {name} returned {returned} for {wanted}: shape and dtype must stay the same")
    return jnp.asarray(y)


def _ordered(taps: Sequence[str], taken: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sort as requested, and the names that match a pattern by layer; jit returns dicts sorted as text."""

    def natural(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return {name: taken[name] for tap in taps for name in sorted(taken, key=natural) if fnmatchcase(name, tap)}


def _check_observed(taps: Any, edits: Any) -> tuple[Taps, Edits]:
    """Return taps and edits as tuples.

    Raises:
        UserError: if taps are not names, or edits not functions by name.
    """
    taps, edits = (taps,) if isinstance(taps, str) else taps, {} if edits is None else edits
    if not isinstance(taps, Sequence) or not all(isinstance(name, str) for name in taps):
        raise UserError(f"taps must be a list of names, such as h.0.attn.pattern: {short_repr(taps)}")
    if not isinstance(edits, Mapping) or not all(isinstance(name, str) and callable(f) for name, f in edits.items()):
        form = "{'h.0.mlp.out': lambda x: 0 * x}"
        raise UserError(f"edits must be functions by name, such as {form}: {short_repr(edits)}")
    for name, edit in edits.items():
        if edit.__hash__ is None:
            raise UserError(f"the edit of {name} is not hashable: wrap it in a function")
    return tuple(taps), tuple(edits.items())


def as_tokens(lm: LM, ids: Any) -> jax.Array:
    """Convert a text or ids to an int32 array `[B, T]`.

    Raises:
        UserError: if the ids have a different shape, or are outside the vocabulary or longer than the context length.
    """
    check_lm(lm)
    model = lm.config.model
    if isinstance(ids, str):
        ids = [encode_prompt(lm.tokenizer, model.vocab_size, ids).ids]
    try:
        known = np.zeros(ids.shape, ids.dtype) if isinstance(ids, jax.core.Tracer) else np.asarray(ids)
    except ValueError:
        raise UserError("the rows of ids have different lengths: pass rows of equal length") from None
    if known.ndim != 2 or not known.size or not np.issubdtype(known.dtype, np.integer):
        raise UserError(f"expected integer ids of shape [B, T], not {known.dtype} of shape {known.shape}")
    if known.shape[1] > model.block_size:
        raise UserError(f"{known.shape[1]} tokens do not fit the context of {model.block_size} (model.block_size)")
    for extreme in (int(known.min()), int(known.max())):
        if not 0 <= extreme < model.vocab_size:
            raise UserError(f"id {extreme} is outside the vocabulary of {model.vocab_size}")
    return jnp.asarray(ids, jnp.int32)
