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
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.kernels.stored import dequantize
from jaxgpt.lm import LM, Generation
from jaxgpt.lm.arguments import encode_prompt, make_settings, row_keys
from jaxgpt.lm.engine import DecodeSession
from jaxgpt.lm.generation import memory_errors, read_request
from jaxgpt.lm.model import check_lm, placed, sampler_of, unstacked
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
    observed = check_observed(taps, edits)
    out = on_tokens(_forward, lm, ids, *observed)
    return out._replace(taps=_ordered(observed[0], out.taps))


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
    lm, observed = unstacked(lm), check_observed(taps, edits)
    text_params, sampling = make_settings(settings, TextParams, SamplingParams)
    request = read_request(lm, [prompt], text_params)
    [row], [new] = request.rows, request.new
    # Checks the names before the model is compiled.
    jax.eval_shape(lambda weights: forward(lm.config, weights, jnp.asarray([row]), *observed), lm.params)
    sampler = sampler_of(lm, sampling, request.params.stop_ids, _ops(lm.config, Observer(observed[1])))
    # Without padding, so that edits see the positions of the prompt.
    session = DecodeSession(sampler, lm.params, [row], row_keys(key, 1, 1), [new], context=len(row))
    text = request.text(0)
    with placed(lm, 1), memory_errors():
        text.add(session.next_tokens(new)[0].tolist())
    assert text.finish_reason is not None
    generation = Generation(text.text, text.ids, text.finish_reason)
    return Generated(row + generation.ids, generation, *replay(lm, row, generation.ids, *observed))


def replay(
    lm: LM, prompt: Sequence[int], new: Sequence[int], taps: Sequence[str] = (), edits: Edits = ()
) -> ForwardPass:
    """Compute the activations of a generated text as generation does: the prompt in one pass, then token by token.

    Generation does not read the last id: it may exceed the context length, where it has no position, and is then omitted.
    """
    lm, model = unstacked(lm), lm.config.model
    if model.positions != "rope" and len(prompt) + len(new) > model.block_size:
        new = new[:-1]
    with placed(lm, 1):
        tokens = jnp.asarray([[*prompt, *new]], jnp.int32)
        out = _replay(lm.config, lm.params, tokens, len(prompt), tuple(taps), edits)
    return out._replace(taps=_ordered(taps, out.taps))


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


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _replay(config: Config, params: Any, tokens_1T: jax.Array, prompt: int, taps: Taps, edits: Edits) -> ForwardPass:
    def call(method: str, *args: Any) -> tuple[Any, ForwardPass]:
        observer = Observer(edits, taps)
        model = GPT(config.model, _ops(config, observer))
        logits, cache = model.apply({"params": params}, *args, method=method)
        return cache, ForwardPass(logits, observer.results())  # type: ignore[arg-type]

    def join(path: Any, first: jax.Array, steps: jax.Array) -> jax.Array:
        """Append the steps, which the scan stacked along a new first axis, to the axis of the queries."""
        name, axis = str(getattr(path[-1], "key", "")), 1
        if name.endswith(
            (".scores", ".pattern")
        ):  # the prompt attends to itself, later tokens to all slots of the cache
            axis, masked = 2, jnp.finfo(first.dtype).min if name.endswith(".scores") else 0
            first = jnp.pad(first, ((0, 0),) * 3 + ((0, steps.shape[-1] - prompt),), constant_values=masked)
        return jnp.concatenate([first, jnp.moveaxis(jnp.squeeze(steps, axis + 1), 0, axis)], axis)

    cache, first = call("prefill", tokens_1T[:, :prompt], jnp.arange(prompt)[None], tokens_1T.shape[1])
    _, steps = jax.lax.scan(lambda cache, t: call("extend", t, cache), cache, tokens_1T[:, prompt:].T[:, :, None])
    return jax.tree_util.tree_map_with_path(join, first, steps)


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


def check_observed(taps: Any, edits: Any) -> tuple[Taps, Edits]:
    """Return taps and edits as tuples.

    Raises:
        UserError: if taps are not names, or edits not functions by name.
    """
    taps = (taps,) if isinstance(taps, str) else taps
    if not isinstance(taps, Sequence) or not all(isinstance(name, str) for name in taps):
        raise UserError(f"taps must be a list of names, such as h.0.attn.pattern: {short_repr(taps)}")
    edits = {} if edits is None else edits
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
    if isinstance(ids, jax.core.Tracer):
        check_ids(model, np.zeros(ids.shape, ids.dtype))
        return ids.astype(jnp.int32)
    try:
        ids_BT = np.asarray(ids)
    except ValueError:
        raise UserError("the rows of ids have different lengths: pass rows of equal length") from None
    check_ids(model, ids_BT)
    return jnp.asarray(ids_BT, jnp.int32)


def check_ids(config: ModelConfig, ids_BT: np.ndarray) -> None:
    """Check that ids are an integer array `[B, T]` within the vocabulary and the context length.

    Raises:
        UserError: if the check fails.
    """
    if ids_BT.ndim != 2 or not ids_BT.size or not np.issubdtype(ids_BT.dtype, np.integer):
        raise UserError(f"expected integer ids of shape [B, T], not {ids_BT.dtype} of shape {ids_BT.shape}")
    if ids_BT.shape[1] > config.block_size:
        raise UserError(f"{ids_BT.shape[1]} tokens do not fit the context of {config.block_size} (model.block_size)")
    for extreme in (int(ids_BT.min()), int(ids_BT.max())):
        if not 0 <= extreme < config.vocab_size:
            raise UserError(f"id {extreme} is outside the vocabulary of {config.vocab_size}")
