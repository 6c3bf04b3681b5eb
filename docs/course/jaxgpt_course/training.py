"""Exercises on training: loss, step, accumulation, adam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgpt.train.loss import cross_entropy, next_token_loss
from jaxgpt.train.step import TrainState, gradients, train_step
from jaxgpt_course.exercise import Exercise, normal

Array = np.ndarray
_V, _D = 7, 4


# loss


@jax.jit
def loss(logits_TV: Any, targets_T: Any) -> Any:
    logits_1TV, targets_1T = jnp.asarray(logits_TV)[None], jnp.asarray(targets_T)[None]
    return cross_entropy(logits_1TV, targets_1T).sum() / (targets_1T >= 0).sum()


def _log_p(logits_TV: Array, targets_T: Array, axis: int = -1) -> Array:
    """Compute the log probability of each target; -1 selects the last id, like an index."""
    shifted = logits_TV - logits_TV.max(axis, keepdims=True)
    log_p: Array = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
    return log_p[np.arange(len(targets_T)), targets_T]


def _of_counted(reduce: Callable[[Array], Any], axis: int = -1) -> Callable[..., Any]:
    """Make a loss that applies `reduce` to the log probabilities of the targets other than -1."""
    return lambda logits, targets: reduce(_log_p(logits, targets, axis)[targets >= 0])


def _without_maximum(logits: Array, targets: Array) -> Any:
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -log_p[np.arange(len(targets)), targets][targets >= 0].mean()


def _is_a_finite_mean(value: Array, logits_TV: Array, targets_T: Array) -> str | None:
    if not np.isfinite(value):
        large = np.abs(logits_TV).max() > 100
        why = ": exp(logits) overflows, or p is 0: use log p = shifted - log(sum(exp(shifted))), shifted = logits - max"
        return f"the loss is {float(value)}" + (why if large else "")
    if value < 0:
        return "the loss is negative: negate the log probability, which is at most 0"
    return None


LOSS = Exercise(
    name="loss",
    page="training",
    statement="Compute the mean cross entropy in nats, a scalar: the mean of -log softmax(logits)[target] over the positions "
    "with a target other than -1. Logits [T, V] may be large; targets [T] are ids, or -1 for masked positions.",
    returns=("value",),
    reference=loss,
    inputs=lambda: {
        "random logits": (normal(0, 6, _V), np.array([1, 0, 6, 2, 5, 3])),
        "one position": (normal(1, 1, _V), np.array([4])),
        "two targets of -1": (normal(2, 6, _V), np.array([1, -1, 0, 2, -1, 4])),
        "large logits of similar size": (1000 + np.round(4 * normal(3, 6, _V)) / 4, np.array([1, 0, 6, 2, 5, 3])),
        "large logits": (1e4 * np.eye(6, _V, dtype=np.float32), np.array([0, 0, 2, 1, 4, 6])),
    },
    mistakes=(
        (
            "the result is the sum of the losses: divide by the number of targets that are not -1",
            _of_counted(lambda x: -x.sum()),
        ),
        ("the mean is missing: return one number, the mean over the positions that count", _of_counted(lambda x: -x)),
        (
            "the mean is missing: return one number, the mean over the positions that count",
            lambda logits, targets: np.where(targets >= 0, -_log_p(logits, targets), 0),
        ),
        ("the mean is missing: return one number, the mean over the positions that count", lambda x, y: -_log_p(x, y)),
        (
            "targets of -1 are counted as id 0: skip these positions",
            lambda logits, targets: -_log_p(logits, np.maximum(targets, 0)).mean(),
        ),
        ("the loss is in bits: use the natural logarithm", _of_counted(lambda x: -x.mean() / np.log(2))),
        ("the sign is wrong: return minus the mean log probability", _of_counted(lambda x: x.mean())),
        (
            "this is the logarithm of the mean probability: take the logarithm of each target's probability, then the mean",
            _of_counted(lambda x: -np.log(np.exp(x).mean())),
        ),
        ("the logarithm is missing: the loss of a target is -log(p)", _of_counted(lambda x: -np.exp(x).mean())),
        (
            "targets of -1 are counted: as an index, -1 is the last id; skip these positions",
            lambda logits, targets: -_log_p(logits, targets).mean(),
        ),
        (
            "the sum is divided by T: divide by the number of targets that are not -1",
            lambda logits, targets: -np.where(targets >= 0, _log_p(logits, targets), 0).mean(),
        ),
        (
            "targets are shifted once more: targets[t] is already the token after position t",
            lambda logits, targets: -_log_p(logits[:-1], targets[1:])[targets[1:] >= 0].mean(),
        ),
        (
            "the softmax runs over the positions: normalize over the vocabulary, the last axis",
            _of_counted(lambda x: -x.mean(), 0),
        ),
        ("exp overflows for large logits: subtract the maximum of each row first", _without_maximum),
        (
            "p is 0 for a target far below the maximum, and log(0) is -inf: use log p = shifted - log(sum(exp(shifted))), "
            "shifted = logits - max",
            _of_counted(lambda x: -np.log(np.exp(x)).mean()),
        ),
    ),
    laws=(_is_a_finite_mean,),
)


# step


def _apply(variables: Any, tokens_BT: jax.Array, key: Any = None, positions: Any = None) -> jax.Array:
    """Compute the logits of the next token from the current token only."""
    params = variables["params"]
    logits_BTV: jax.Array = jnp.take(params["embedding"], tokens_BT, axis=0) @ params["head"]
    return logits_BTV


_OBJECTIVE = next_token_loss(_apply)
_PARAMS = {"embedding": normal(0, _V, _D), "head": normal(1, _D, _V)}
_OPTIMIZER = optax.adamw(0.03, weight_decay=0.1)  # weight decay, which needs the parameters in `update`


@jax.jit
def _sums(params: Any, windows_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the sum of the losses of a batch, and the number of targets other than -1."""
    sums = _OBJECTIVE(params, jnp.asarray(windows_BT1), None)
    return sums.loss_B.sum(), sums.count_B.sum()


@jax.jit
def _mean(params: Any, windows_BT1: jax.Array) -> jax.Array:
    """Compute the mean loss of a batch."""
    total, count = _sums(params, windows_BT1)
    return total / count


@partial(jax.jit, static_argnums=(2, 3))
def step(state: Any, batch: Any, loss: Callable[..., Any], optimizer: Any) -> Any:
    params, opt_state = state
    before = TrainState(jnp.int32(0), params, opt_state, None)
    after, metrics = train_step(before, jnp.asarray(batch), objective=_OBJECTIVE, optimizer=optimizer)
    return (after.params, after.opt_state), metrics["loss"]


def _step(
    update: Callable[[Any, Any, Any], Any] = lambda params, updates, grads: optax.apply_updates(params, updates),
    keep_state: bool = False,
    loss_after: bool = False,
    sign: float = 1.0,
    fresh: bool = False,
) -> Callable[..., Any]:
    """Make a train step, correct by default; an argument adds a deliberate bug."""

    def step(state: Any, batch: Any, loss: Callable[..., Any], optimizer: Any) -> Any:
        params, old = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        before = optimizer.init(params) if fresh else old
        updates, new = optimizer.update(jax.tree.map(lambda g: sign * g, grads), before, params)
        after = update(params, updates, grads)
        return (after, old if keep_state else new), loss(after, batch) if loss_after else value

    return step


def _states() -> dict[str, tuple[Any, ...]]:
    """Make the arguments of the first step, and of the third step, with nonzero moments."""
    first: Any = (_PARAMS, jax.tree.map(np.asarray, _OPTIMIZER.init(_PARAMS)))
    batches = np.random.default_rng(0).integers(0, _V, (3, 4, 6)).astype(np.int32)
    later: Any = first
    for batch in batches[:2]:
        later = jax.tree.map(np.asarray, _step()(later, batch, _mean, _OPTIMIZER)[0])
    return {
        "the first step": (first, batches[0], _mean, _OPTIMIZER),
        "a later step": (later, batches[2], _mean, _OPTIMIZER),
    }


STEP = Exercise(
    name="step",
    page="training",
    statement="Write a train step as a pure function. state is (params, opt_state); loss(params, batch) is a scalar; optimizer "
    "is an optax optimizer. Return the new state, and the loss before the update.",
    returns=("state", "value"),
    reference=step,
    inputs=_states,
    mistakes=(
        (
            "the loss is computed with new parameters: return the value that jax.value_and_grad computed, before the update",
            _step(loss_after=True),
        ),
        (
            "the optimizer's state is not updated: return the state that optimizer.update returns",
            _step(keep_state=True),
        ),
        (
            "the parameters do not change: return optax.apply_updates(params, updates)",
            _step(update=lambda params, updates, grads: params),
        ),
        (
            "the step goes uphill: updates are added (optax.apply_updates), optax has already negated them",
            _step(update=lambda params, updates, grads: jax.tree.map(lambda p, u: p - u, params, updates)),
        ),
        ("the gradient has the wrong sign: pass it as jax.grad returns it, optax negates it", _step(sign=-1.0)),
        *(
            (
                "gradients are subtracted from the parameters: apply the updates that the optimizer made of them",
                _step(lambda params, updates, grads: jax.tree.map(lambda p, g: p - g, params, grads), keep_state=keep),
            )
            for keep in (False, True)
        ),
        *(
            (
                "the raw gradients are added to the parameters: apply the updates that optimizer.update returns",
                _step(lambda params, updates, grads: optax.apply_updates(params, grads), keep_state=keep),
            )
            for keep in (False, True)
        ),
        (
            "the optimizer's state starts again at each step: update the state that is given, do not call optimizer.init",
            _step(fresh=True),
        ),
        (
            "the optimizer's updates are returned as the parameters: add them with optax.apply_updates(params, updates)",
            _step(update=lambda params, updates, grads: updates),
        ),
    ),
)


# accumulation


@partial(jax.jit, static_argnums=2)
def accumulate(params: Any, microbatches: Sequence[Any], loss_sum: Callable[..., Any]) -> Any:
    batch = jnp.concatenate([jnp.asarray(m) for m in microbatches])
    means, grads = gradients(params, batch, None, objective=_OBJECTIVE)
    return means["loss"], grads


def _parts(params: Any, microbatches: Sequence[Any], loss_sum: Callable[..., Any]) -> tuple[Any, Array]:
    """Compute (loss, gradient) sums of each microbatch, stacked, and the counts."""
    grad = jax.value_and_grad(loss_sum, has_aux=True)
    parts = [grad(params, m) for m in microbatches]
    sums = jax.tree.map(lambda *xs: np.stack(xs), *((total, grads) for (total, _), grads in parts))
    return sums, np.array([count for (_, count), _ in parts])


def _combined(
    of_loss: Callable[[Array, Array], Any], of_grads: Callable[[Array, Array], Any] | None = None
) -> Callable[..., Any]:
    """Make an accumulation from functions that combine the sums and counts of all microbatches."""

    def accumulate(params: Any, microbatches: Sequence[Any], loss_sum: Callable[..., Any]) -> Any:
        (totals, grads), counts = _parts(params, microbatches, loss_sum)
        return of_loss(totals, counts), jax.tree.map(lambda g: (of_grads or of_loss)(g, counts), grads)

    return accumulate


def _divided_once(sums: Array, counts: Array) -> Any:
    return sums.sum(0) / counts.sum()


def _mean_of_means(sums: Array, counts: Array) -> Any:
    return (sums / counts.reshape(-1, *[1] * (sums.ndim - 1))).mean(0)


def _is_finite(result: Any, *arguments: Any) -> str | None:
    if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result)):
        return None
    return "a result is not finite (a microbatch without tokens gives 0 / 0): add up the sums and the counts, and divide once"


def _microbatches(*counts: int) -> list[Array]:
    """Make a microbatch of 2 windows for each number of targets in `counts`; other targets are -1."""
    rng = np.random.default_rng(sum(counts))
    batches = []
    for count in counts:
        windows = rng.integers(0, _V, (2, 6)).astype(np.int32)
        windows[:, 1:][np.arange(10).reshape(2, 5) >= count] = -1
        batches.append(windows)
    return batches


_UNEQUAL = "averaged over microbatches of unequal token counts: add up the sums and the counts, and divide once"
_sums_of_windows: Callable[..., Any] = partial(_sums)

ACCUMULATION = Exercise(
    name="accumulation",
    page="training",
    statement="Compute the mean loss of a batch and its gradient, one microbatch at a time. loss_sum(params, microbatch) "
    "returns the sum of the losses and the number of tokens; the result must not depend on the split.",
    returns=("value", "grads"),
    reference=accumulate,
    inputs=lambda: {
        "equal token counts": (_PARAMS, _microbatches(10, 10, 10), _sums_of_windows),
        "unequal token counts": (_PARAMS, _microbatches(10, 2, 7), _sums_of_windows),
        "one microbatch": (_PARAMS, _microbatches(6), _sums_of_windows),
        "a microbatch without tokens": (_PARAMS, _microbatches(5, 0, 8), _sums_of_windows),
    },
    mistakes=(
        (f"loss and gradient are {_UNEQUAL}", _combined(_mean_of_means)),
        (f"the gradient is {_UNEQUAL}", _combined(_divided_once, _mean_of_means)),
        (f"the loss is {_UNEQUAL}", _combined(_mean_of_means, _divided_once)),
        (
            "the sums are not divided: divide loss and gradient by the number of tokens",
            _combined(lambda sums, counts: sums.sum(0)),
        ),
        (
            "the gradient is not divided: divide it by the number of tokens, too",
            _combined(_divided_once, lambda sums, counts: sums.sum(0)),
        ),
        (
            "the sums are divided by the number of microbatches: divide them by the number of tokens",
            _combined(lambda sums, counts: sums.mean(0)),
        ),
        (
            "only the last microbatch counts: add up the sums of all of them",
            _combined(lambda sums, counts: sums[-1] / counts[-1]),
        ),
        (
            "the sums of all microbatches are divided by the tokens of the last one: add up the counts, too",
            _combined(lambda sums, counts: sums.sum(0) / counts[-1]),
        ),
    ),
    laws=(_is_finite,),
)


# adam

_B1, _B2, _EPS = 0.9, 0.99, 1e-8


@jax.jit
def adam(w: Any, g: Any, m: Any, v: Any, t: Any, rate: Any) -> Any:
    optimizer = optax.scale_by_adam(b1=_B1, b2=_B2, eps=_EPS)
    state = optax.ScaleByAdamState(jnp.int32(t) - 1, jnp.asarray(m), jnp.asarray(v))
    update, state = optimizer.update(jnp.asarray(g), state)
    return w - rate * update, state.mu, state.nu


def _adam(
    m_of: Callable[[Array, Array], Array] = lambda m, g: _B1 * m + (1 - _B1) * g,
    v_of: Callable[[Array, Array], Array] = lambda v, g: _B2 * v + (1 - _B2) * g**2,
    corrected: Callable[[int], tuple[float, float]] = lambda t: (1 - _B1**t, 1 - _B2**t),
    root: Callable[[Array], Array] = np.sqrt,
    eps: float = _EPS,
    sign: float = 1.0,
    stored: bool = False,
    result: Callable[[Array, Array, float], Array] = lambda w, update, rate: w - update,
) -> Callable[..., Any]:
    """Make an Adam step, correct by default; an argument adds a deliberate bug."""

    def adam(w: Array, g: Array, m: Array, v: Array, t: int, rate: float) -> Any:
        m, v = m_of(m, g), v_of(v, g)
        c_m, c_v = corrected(t)
        update = sign * rate * (m / c_m) / (root(v / c_v) + eps)
        new = result(w, update, rate)
        return (new, m / c_m, v / c_v) if stored else (new, m, v)

    return adam


ADAM = Exercise(
    name="adam",
    page="update",
    statement="Compute a step of Adam: m = 0.9 m + 0.1 g, v = 0.99 v + 0.01 g^2, then w - rate * m_hat / (sqrt(v_hat) + 1e-8), "
    "where m_hat = m / (1 - 0.9^t) and v_hat = v / (1 - 0.99^t). t counts steps from 1. Return the new w, m and v.",
    returns=("w", "m", "v"),
    reference=adam,
    inputs=lambda: {
        "the first step": (normal(0, 5), normal(1, 5), np.zeros(5, np.float32), np.zeros(5, np.float32), 1, 0.1),
        "a later step": (normal(2, 5), normal(3, 5), normal(4, 5) / 3, normal(5, 5) ** 2, 7, 0.1),
        "a gradient of 0": (
            normal(6, 3),
            np.zeros(3, np.float32),
            np.zeros(3, np.float32),
            np.zeros(3, np.float32),
            1,
            0.1,
        ),
        "gradients of about 1e-5": (
            normal(7, 5),
            1e-5 * normal(8, 5),
            np.zeros(5, np.float32),
            np.zeros(5, np.float32),
            1,
            0.1,
        ),
    },
    mistakes=(
        (
            "the correction is missing: divide m by 1 - 0.9^t and v by 1 - 0.99^t, since both began at 0",
            _adam(corrected=lambda t: (1.0, 1.0)),
        ),
        ("v is not corrected: divide it by 1 - 0.99^t", _adam(corrected=lambda t: (1 - _B1**t, 1.0))),
        ("m is not corrected: divide it by 1 - 0.9^t", _adam(corrected=lambda t: (1.0, 1 - _B2**t))),
        ("both are divided by 1 - 0.9^t: divide v by 1 - 0.99^t", _adam(corrected=lambda t: (1 - _B1**t, 1 - _B1**t))),
        (
            "the corrected averages are returned: return the uncorrected m and v, because the next step averages them",
            _adam(stored=True),
        ),
        ("the root is missing: divide by sqrt(v_hat) + 1e-8", _adam(root=lambda v: v)),
        ("v averages the gradient: average its square, g^2", _adam(v_of=lambda v, g: _B2 * v + (1 - _B2) * g)),
        ("m sums the gradients: average them, 0.9 m + 0.1 g", _adam(m_of=lambda m, g: _B1 * m + g)),
        ("v sums the squares: average them, 0.99 v + 0.01 g^2", _adam(v_of=lambda v, g: _B2 * v + g**2)),
        (
            "the two factors are exchanged: the old average has 0.9, the gradient 0.1",
            _adam(lambda m, g: (1 - _B1) * m + _B1 * g, lambda v, g: (1 - _B2) * v + _B2 * g**2),
        ),
        ("the step goes uphill: subtract it", _adam(sign=-1.0)),
        ("1e-8 is missing: a gradient of 0 gives 0 / 0", _adam(eps=0.0)),
        (
            "1e-8 is inside the root: add it to sqrt(v_hat), which matters for small gradients",
            _adam(root=lambda v: np.sqrt(v + _EPS), eps=0.0),
        ),
        (
            "v uses 0.999: here it is 0.99, in the average and in its correction",
            _adam(v_of=lambda v, g: 0.999 * v + 0.001 * g**2, corrected=lambda t: (1 - _B1**t, 1 - 0.999**t)),
        ),
        (
            "the corrections count steps from 0: t is 1 at the first step, so use 0.9^t, not 0.9^(t + 1)",
            _adam(corrected=lambda t: (1 - _B1 ** (t + 1), 1 - _B2 ** (t + 1))),
        ),
        (
            "the corrections are 0 at the first step: t is 1 there, so use 0.9^t, not 0.9^(t - 1)",
            _adam(corrected=lambda t: (1 - _B1 ** (t - 1), 1 - _B2 ** (t - 1))),
        ),
        *(
            (
                "the change of w is returned: return the new w, w - rate * m_hat / (sqrt(v_hat) + 1e-8)",
                _adam(result=result),
            )
            for result in (
                lambda w, update, rate: update,
                lambda w, update, rate: -update,
                lambda w, update, rate: update / rate,
            )
        ),
    ),
)
