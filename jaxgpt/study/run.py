"""Read and edit activations by name, in a forward pass and in generation.

The model passes each named activation to `ops.edit` and uses the array that it returns. Here, `ops.edit` is an `Observer`,
which applies edits and collects taps. Without edits and taps, `ops.edit` is None, and the compiled program equals the
program of `GPT.apply`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.checkpoint.match import check_names
from jaxgpt.config import ModelConfig, SamplingParams, TextParams
from jaxgpt.decoding import TokenBuffer, sample_token
from jaxgpt.decoding.sampling import Sampled
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.lm import LM, Generation
from jaxgpt.lm.arguments import encode_prompt, make_settings, row_keys, start_ids
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.generation import read_request
from jaxgpt.lm.model import check_lm
from jaxgpt.lm.placement import placed
from jaxgpt.lm.sampler import OnlyIds, only_text
from jaxgpt.lm.weights import dequantize
from jaxgpt.model import GPT
from jaxgpt.model.scan import STACKED, unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.options import SEED

Result = TypeVar("Result")
Taps = tuple[str, ...]
Edit = Callable[[jax.Array], Any]
Edits = tuple[tuple[str, Edit], ...]


class ForwardPass(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: `[B, T, V]`, float32.
        taps: dict of the requested activations, keyed by name, after edits, in order of computation.
    """

    logits: jax.Array
    taps: dict[str, jax.Array]


def names(lm: LM, shape: tuple[int, int] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """List the activations of a model in the order in which they are computed, with shapes and dtypes.

    `shape` is the `(B, T)` of the ids; None: one row of the context length.
    """
    check_lm(lm)
    tokens = jax.ShapeDtypeStruct(shape or (1, lm.config.model.block_size), jnp.int32)
    tap_all = partial(forward, observed(lm), taps=("*",))
    out: Any = jax.eval_shape(tap_all, lm.params, tokens)
    return dict(out.taps)


def run(lm: LM, ids: Any, taps: Sequence[str] = (), edits: Mapping[str, Edit] | None = None) -> ForwardPass:
    """Compute logits and activations in one forward pass, with edits of activations.

    An edit is a pure function of an activation, traced with the model: `{"h.3.mlp.out": lambda x: 0 * x}`. Attention uses the
    reference implementation, which exposes its scores and pattern. The result is differentiable, including with respect to
    arrays that an edit closes over, and `run` can be called under `jax.vmap`, `jax.grad` and `jax.jit`. Programs are cached by
    the identity of the edits: define each edit once, or call `run` in a jitted function of the values that change.

    Args:
        lm: the model. Quantized weights are dequantized to float32, and stacked weights are unstacked.
        ids: a text, or token ids as an integer array `[B, T]` or nested lists.
        taps: names of activations to return, as `names(lm)` lists them; `*` matches any part of a name: `h.*.attn.pattern`.
        edits: dict of functions, keyed by activation name, which may also contain `*`.

    Raises:
        UserError: if a name matches no activation, an edit changes a shape or dtype, or the ids are not integers
            `[B, T]` within the vocabulary and context length.
    """
    taps = (taps,) if isinstance(taps, str) else tuple(taps)
    return on_tokens(_forward, lm, ids, taps, tuple((edits or {}).items()))


class Captured(NamedTuple):
    """Logits, hidden states and attention maps of one forward pass, as in transformers.

    Attributes:
        logits: `[B, T, V]`.
        hidden: L + 1 arrays `[B, T, D]`: the input of the first block, then the output of each block, the last after the
            final norm, if any. In transformers, these are the `hidden_states`.
        attentions: L arrays `[B, N, T, T]`, float32: rows sum to 1 and are 0 above the diagonal.
    """

    logits: jax.Array
    hidden: tuple[jax.Array, ...]
    attentions: tuple[jax.Array, ...]


def capture(lm: LM, ids: Any) -> Captured:
    """Compute the logits, hidden states and attention maps of a text or ids `[B, T]`; errors as in `run`."""
    check_lm(lm)
    hidden = hidden_names(lm.config.model)
    attentions = layer_names(lm.config.model, "attn.pattern")
    logits, taps = run(lm, ids, [*hidden, *attentions])
    return Captured(
        logits=logits,
        hidden=tuple(taps[name] for name in hidden),
        attentions=tuple(taps[name] for name in attentions),
    )


def layer_names(config: ModelConfig, activation: str) -> list[str]:
    """Return the names of an activation, such as `resid.pre` or `attn.pattern`, in all layers."""
    layers = range(config.n_layer)
    if activation.startswith("resid."):
        return [f"{activation}.{layer}" for layer in layers]
    return [f"h.{layer}.{activation}" for layer in layers]


def stream_names(config: ModelConfig) -> list[str]:
    """Return names of residual stream activations: each block's input, and the last block's output."""
    return [*layer_names(config, "resid.pre"), f"resid.post.{config.n_layer - 1}"]


def hidden_names(config: ModelConfig) -> list[str]:
    """Return the names of the hidden states that `capture` returns."""
    *inputs, last = stream_names(config)
    if config.final_norm and config.norm != "none":
        last = "ln_f.out"
    return [*inputs, last]


class Generated(NamedTuple):
    """A generated text with its activations.

    Attributes:
        ids: the ids of the prompt and of the generated text.
        generation: text, ids and finish reason of the generated part, as from `jaxgpt.generate`.
        logits: `[1, T, V]`, at each of the ids; the last id is omitted if its position exceeds the context.
        taps: dict of the requested activations, keyed by name, at the same ids.
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
    """Continue a prompt with edits of activations, and return activations of the whole text.

    No KV cache is used: each token is sampled from a forward pass over the text so far, padded to the final length.
    An edit therefore receives all positions in one call, as in `run`.

    Args:
        prompt: a text or ids.
        taps: names of activations to return, as for `run`.
        edits: as for `run`.
        key: random key of the samples: a seed or a `jax.random.key`.
        **settings: fields of `TextParams` (`overflow` and `lookup` have no effect) and `SamplingParams`.

    Raises:
        UserError: as in `jaxgpt.generate`, in `run` for taps and edits, or if prompt and new tokens exceed the context length.
    """
    check_lm(lm)
    params, sampling = make_settings(with_defaults(lm.tokenizer, settings), TextParams, SamplingParams)
    request = read_request(lm, [prompt], replace(params, overflow="error"))
    [row] = request.rows
    [new] = request.new
    text = request.text(0)
    key_1 = row_keys(key, 1)
    within_context = slice(lm.config.model.block_size)

    # Each token is sampled from the logits of the whole text, which has room for the new tokens.
    ids_1S = jnp.pad(jnp.asarray([row]), ((0, 0), (0, new)))
    so_far = TokenBuffer(ids_1S, jnp.int32(len(row)))
    for made in range(new):
        at = len(row) + made - 1
        logits_1TV = np.asarray(run(lm, so_far.ids_BS[:, within_context], (), edits).logits)
        last_11V = logits_1TV[:, at : at + 1]
        sampled = _next_token(last_11V, so_far, key_1, made, sampling, only_text(lm))
        text.add(sampled.token_B.tolist(), sampled.log_p_B.tolist())
        if text.finish_reason:
            break
        so_far = so_far.append(sampled.token_B[:, None])
    assert text.finish_reason is not None

    ids = row + text.ids
    logits, found = run(lm, [ids[within_context]], taps, edits)
    generation = Generation(text.text, text.ids, text.finish_reason, log_p=text.log_p, stop_id=text.stop_id)
    return Generated(ids, generation, logits, found)


def on_tokens(compute: Callable[..., Result], lm: LM, ids: Any, *args: Any) -> Result:
    """Return `compute(model, params, tokens_BT, *args)` for a text or ids, on the devices of the model."""
    tokens_BT = as_tokens(lm, ids)
    with placed(lm, len(tokens_BT)):
        return compute(observed(lm), lm.params, tokens_BT, *args)


def observed(lm: LM) -> GPT:
    """Return the module of a model with the reference operations, which have all activations."""
    return lm.model(lm.config.model, Ops(jnp.dtype(lm.config.train.compute_dtype)))


def forward(model: GPT, params: Any, tokens_BT: jax.Array, taps: Taps = (), edits: Edits = ()) -> ForwardPass:
    """Run the model with an observer: `run` without jit, the mesh and the checks of ids."""
    if STACKED in params:
        params = unstack_layers(params, model.config.n_layer)
    params = dequantize(params)  # because int8 products round their inputs, and gradients would be wrong
    check_names(params, model)

    observer = Observer(edits, taps)
    if edits or taps:
        model = model.clone(ops=model.ops._replace(edit=observer))
    logits_BTV: Any = model.apply({"params": params}, tokens_BT)
    return ForwardPass(logits_BTV, observer.results())


_forward = jax.jit(forward, static_argnums=(0, 3, 4))


@partial(jax.jit, static_argnums=(4, 5))
def _next_token(
    logits_11V: jax.Array, text: TokenBuffer, key_1: jax.Array, made: int, sampling: SamplingParams, only: OnlyIds
) -> Sampled:
    return sample_token(logits_11V[:, 0], text, key_1, jnp.int32(made), sampling, (only,))


@dataclass(frozen=True)
class Observer:
    """An `ops.edit` that applies edits and collects taps during tracing; compared by edits and taps."""

    edits: Edits = ()
    taps: Taps = ()
    taken: OrderedDict[str, jax.Array] = field(default_factory=OrderedDict, compare=False)  # order preserved by jit
    seen: list[str] = field(default_factory=list, compare=False)

    def __call__(self, path: str, x: jax.Array) -> jax.Array:
        """Apply the matching edits to an activation, and record it if it is tapped."""
        # Convert the path `h_3/attn/q` to the name `h.3.attn.q`, and `h_3/resid.pre` to `resid.pre.3`.
        name = re.sub(r"^h_(\d+)\.", r"h.\1.", path.replace("/", "."))
        name = re.sub(r"^h\.(\d+)\.(resid\.\w+)$", r"\2.\1", name)
        self.seen.append(name)
        for wanted, edit in self.edits:
            if not fnmatchcase(name, wanted):
                continue
            before = x
            x = jnp.asarray(edit(x))
            if (x.shape, x.dtype) != (before.shape, before.dtype):
                raise UserError(
                    f"the edit of {name} returned {x.dtype} {list(x.shape)} for {before.dtype} {list(before.shape)}: shape "
                    f"and dtype must stay the same"
                )
        if any(fnmatchcase(name, wanted) for wanted in self.taps):
            self.taken[name] = x
        return x

    def results(self) -> dict[str, jax.Array]:
        """Return the taps; raise `UserError` if a name matches no activation."""
        edited = [name for name, _ in self.edits]
        for wanted in (*self.taps, *edited):
            if not any(fnmatchcase(name, wanted) for name in self.seen):
                near = did_you_mean(wanted, self.seen)
                raise UserError(f"no activation {short_repr(wanted)}{near}: jaxgpt.study.names(lm) lists all names")
        return self.taken


def as_tokens(lm: LM, ids: Any) -> jax.Array:
    """Convert a text or ids to an int32 array `[B, T]`.

    Raises `UserError` if ids are not integers `[B, T]`, are outside the vocabulary, or exceed the context length.
    """
    check_lm(lm)
    model = lm.config.model
    if isinstance(ids, str):
        ids = [encode_prompt(lm.tokenizer, model.vocab_size, ids) or start_ids(lm.tokenizer)]
    try:
        # The values of traced ids are unknown: check their shape and dtype.
        known = np.zeros(ids.shape, ids.dtype) if isinstance(ids, jax.core.Tracer) else np.asarray(ids)
    except ValueError:
        raise UserError("expected integer ids of shape [B, T], not rows of different lengths") from None
    is_integer = np.issubdtype(known.dtype, np.integer)
    if known.ndim != 2 or not known.size or not is_integer:
        raise UserError(f"expected integer ids of shape [B, T], not {known.dtype} of shape {known.shape}")
    if known.shape[1] > model.block_size:
        raise UserError(f"{known.shape[1]} tokens do not fit the context of {model.block_size}: use fewer tokens")
    for extreme in (int(known.min()), int(known.max())):
        if not 0 <= extreme < model.vocab_size:
            raise UserError(
                f"id {extreme} is outside the vocabulary of {model.vocab_size}: use ids of the model's tokenizer"
            )
    return jnp.asarray(ids, jnp.int32)
