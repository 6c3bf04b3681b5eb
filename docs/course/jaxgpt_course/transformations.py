"""Exercises on transformations: vjp, aux, scan, devices, seeds, examples, hvp."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from jaxgpt_course.exercise import Exercise, normal

Array = np.ndarray
_D, _F, _V = 4, 3, 5  # width of the inputs, hidden units, classes
_PARAMS = {"hidden": normal(0, _D, _F), "head": normal(1, _F, _V)}
_RATE = 0.5


@jax.jit
def _logits(params: Any, x_BD: Any) -> Any:
    """Compute the logits of a classifier with one hidden layer, `[..., V]`."""
    return jnp.tanh(jnp.asarray(x_BD) @ params["hidden"]) @ params["head"]


def _losses(logits_BV: Any, y_B: Any) -> Any:
    """Compute the cross entropy of each row, 0 for labels of -1."""
    log_p_BV = jax.nn.log_softmax(logits_BV)
    log_p_B = jnp.take_along_axis(log_p_BV, jnp.maximum(jnp.asarray(y_B), 0)[..., None], -1)[..., 0]
    return -jnp.where(jnp.asarray(y_B) >= 0, log_p_B, 0.0)


@jax.jit
def _mean_loss(params: Any, batch: Any) -> Any:
    x_BD, y_B = batch
    return _losses(_logits(params, x_BD), y_B).mean()


@jax.jit
def _descend(params: Any, batch: Any) -> Any:
    """Take a step of gradient descent; return the new parameters, and the loss before the step."""
    value, grads = jax.value_and_grad(_mean_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - _RATE * g, params, grads), value


def _data(seed: int, *shape: int) -> tuple[Array, Array]:
    """Make inputs `[..., D]` and labels `[...]`."""
    labels = np.random.default_rng(seed).integers(0, _V, shape).astype(np.int32)
    return normal(seed, *shape, _D), labels


def _norm(tree: Any) -> Any:
    """Compute the norm of all leaves together."""
    return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


# vjp


@jax.jit
def softmax_vjp(scores_TS: Any, u_TS: Any) -> Any:
    _, pull_back = jax.vjp(jax.nn.softmax, jnp.asarray(scores_TS))
    (v_TS,) = pull_back(jnp.asarray(u_TS))
    return v_TS


def _softmax(scores_TS: Array, axis: int = -1) -> Array:
    exp_TS: Array = np.exp(scores_TS - scores_TS.max(axis, keepdims=True))
    return exp_TS / exp_TS.sum(axis, keepdims=True)


def _pulled(formula: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    """Make an answer that computes the softmax weights, and applies a formula to them and u."""
    return lambda scores_TS, u_TS: formula(_softmax(scores_TS), u_TS)


def _rows_sum_to_0(v_TS: Array, scores_TS: Array, u_TS: Array) -> str | None:
    if np.isnan(v_TS).any():
        return "some results are NaN: a masked score has the weight 0 and the result 0"
    if not np.allclose(v_TS.sum(-1), 0, atol=1e-4):
        return "the rows do not sum to 0: adding a constant to all scores of a row changes no weight"
    return None


VJP = Exercise(
    name="vjp",
    page="functions",
    statement="Compute the vjp of the softmax by hand. With p = softmax(scores) over the last axis, dp_i / dx_j = "
    "p_i (1[i = j] - p_j). Given u_TS, one number for each weight, return v_j = sum_i u_i dp_i / dx_j for each row, "
    "without building the Jacobian.",
    returns=("v_TS",),
    reference=softmax_vjp,
    inputs=lambda: {
        "random scores": (normal(0, 3, 6), normal(1, 3, 6)),
        "masked scores": (np.where(np.tri(4, 6, 2) > 0, normal(2, 4, 6), -np.inf).astype(np.float32), normal(3, 4, 6)),
        "one key": (normal(4, 3, 1), normal(5, 3, 1)),
    },
    mistakes=(
        (
            "only the diagonal of the Jacobian is used: each weight depends on all scores of its row, so subtract "
            "p_j sum_i u_i p_i, not p_j u_j p_j",
            _pulled(lambda p, u: p * (1 - p) * u),
        ),
        ("the sum over i is missing: v = p (u - sum(u p))", _pulled(lambda p, u: p * u)),
        ("the factor p is missing: v = p (u - sum(u p))", _pulled(lambda p, u: u - (u * p).sum(-1, keepdims=True))),
        (
            "the sum of u is not weighted: subtract sum(u p), the mean of u under the weights",
            _pulled(lambda p, u: p * (u - u.sum(-1, keepdims=True))),
        ),
        (
            "the plain mean of u is subtracted: subtract sum(u p), the mean of u under the weights",
            _pulled(lambda p, u: p * (u - u.mean(-1, keepdims=True))),
        ),
        (
            "the sum runs over the queries: each row is a separate softmax, so sum over the last axis",
            _pulled(lambda p, u: p * (u - (u * p).sum(0, keepdims=True))),
        ),
        (
            "the sum runs over the whole array: each row is a separate softmax (axis=-1, keepdims=True)",
            _pulled(lambda p, u: p * (u - (u * p).sum())),
        ),
        ("this is the softmax of the scores: pull u back through it", _pulled(lambda p, u: p)),
        (
            "this is the vjp of log softmax, u - p sum(u): the vjp of the softmax is p (u - sum(u p))",
            _pulled(lambda p, u: u - p * u.sum(-1, keepdims=True)),
        ),
        ("the sign is wrong: v = p (u - sum(u p))", _pulled(lambda p, u: p * ((u * p).sum(-1, keepdims=True) - u))),
    ),
    laws=(_rows_sum_to_0,),
)


# aux


@partial(jax.jit, static_argnums=0)
def loss_and_accuracy(logits_of: Callable[[Any, Any], Any], params: Any, x_BD: Any, y_B: Any) -> Any:
    def loss(params: Any) -> Any:
        logits_BV = logits_of(params, x_BD)
        accuracy = (logits_BV.argmax(-1) == y_B).mean()
        return _losses(logits_BV, y_B).mean(), accuracy

    (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, accuracy, grads


@jax.jit
def _gradient(params: Any, x_BD: Any, y_B: Any) -> Any:
    return jax.grad(_mean_loss)(params, (x_BD, y_B))


def _with_aux(
    loss: Callable[[Array], Any] = lambda losses_B: losses_B.mean(),
    accuracy: Callable[[Array, Array], Any] = lambda right_B, losses_B: right_B.mean(),
    factor: Callable[[int], float] = lambda B: 1.0,
    result: Callable[[Any, Any, Any], Any] = lambda value, accuracy, grads: (value, accuracy, grads),
) -> Callable[..., Any]:
    """Make an answer, correct by default; an argument adds a deliberate bug. `factor` multiplies the gradient."""

    def loss_and_accuracy(logits_of: Callable[[Any, Any], Any], params: Any, x_BD: Any, y_B: Any) -> Any:
        logits_BV = logits_of(params, x_BD)
        losses_B = np.asarray(_losses(logits_BV, y_B))
        right_B = np.asarray(logits_BV.argmax(-1) == y_B, np.float32)
        grads = jax.tree.map(lambda g: factor(len(y_B)) * np.asarray(g), _gradient(params, x_BD, y_B))
        return result(loss(losses_B), accuracy(right_B, losses_B), grads)

    return loss_and_accuracy


AUX = Exercise(
    name="aux",
    page="functions",
    statement="Compute the mean cross entropy of a classifier, its accuracy (the fraction of rows with the largest logit at "
    "the label), and the gradient of the loss, with one forward pass: jax.value_and_grad(f, has_aux=True). "
    "logits_of(params, x_BD) returns logits [B, V]; labels y_B are ids. The function is also called under jax.jit.",
    returns=("value", "accuracy", "grads"),
    reference=loss_and_accuracy,
    inputs=lambda: {
        "8 rows": (_logits, _PARAMS, *_data(0, 8)),
        "1 row": (_logits, _PARAMS, *_data(1, 1)),
    },
    mistakes=(
        (
            "loss and accuracy are exchanged: value_and_grad with has_aux=True returns ((value, aux), grads)",
            _with_aux(result=lambda value, accuracy, grads: (accuracy, value, grads)),
        ),
        (
            "the gradient is 0: argmax has no derivative, so differentiate the loss and return the accuracy as aux",
            _with_aux(factor=lambda B: 0.0),
        ),
        ("the loss is the sum over the rows: take the mean", _with_aux(loss=lambda losses_B: losses_B.sum())),
        (
            "loss and gradient are sums over the rows: take the mean",
            _with_aux(loss=lambda losses_B: losses_B.sum(), factor=float),
        ),
        ("the gradient is the gradient of the summed loss: differentiate the mean", _with_aux(factor=float)),
        (
            "the accuracy is a number of rows: divide it by B",
            _with_aux(accuracy=lambda right_B, losses_B: right_B.sum()),
        ),
        (
            "the accuracy is missing its mean: return one number, the fraction of right rows",
            _with_aux(accuracy=lambda right_B, losses_B: right_B),
        ),
        (
            "this is the mean probability of the labels: the accuracy counts rows with the largest logit at the label",
            _with_aux(accuracy=lambda right_B, losses_B: np.exp(-losses_B).mean()),
        ),
        (
            "this is the fraction of wrong rows: the accuracy is the fraction of right ones",
            _with_aux(accuracy=lambda right_B, losses_B: 1 - right_B.mean()),
        ),
        (
            "the sign is wrong: the loss is the mean of -log p, and the gradient follows it",
            _with_aux(loss=lambda losses_B: -losses_B.mean(), factor=lambda B: -1.0),
        ),
    ),
    jit="arrays have no values there: use jnp functions, and return arrays without float() or int()",
)


# scan


@partial(jax.jit, static_argnums=0)
def fold(step: Callable[[Any, Any], Any], state: Any, batches: Any) -> Any:
    return jax.lax.scan(step, jax.tree.map(jnp.asarray, state), jax.tree.map(jnp.asarray, batches))


def _at(batches: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], batches)


def _loop(
    order: Callable[[int], list[int]] = lambda n: list(range(n)),
    carried: bool = True,
    state_before: bool = False,
    reduce: Callable[[Any], Any] = lambda losses: losses,
) -> Callable[..., Any]:
    """Make a loop over the batches, correct by default; an argument adds a deliberate bug."""

    def fold(step: Callable[[Any, Any], Any], state: Any, batches: Any) -> Any:
        n = len(jax.tree.leaves(batches)[0])
        now = before = state
        losses = []
        for i in order(n):
            before = now
            now, value = step(now if carried else state, _at(batches, i))
            losses.append(np.asarray(value))
        return before if state_before else now, reduce(np.stack(losses))

    return fold


SCAN = Exercise(
    name="scan",
    page="functions",
    statement="Write training as a fold: apply step(state, batch) -> (state, loss) to N batches in order, each time to the "
    "state of the previous step. batches is a tree of arrays [N, ...], one row for each step. Return the last state and the "
    "losses of all steps. The function is also called under jax.jit.",
    returns=("state", "losses_N"),
    reference=fold,
    inputs=lambda: {
        "4 steps": (_descend, _PARAMS, _data(0, 4, 6)),
        "1 step": (_descend, _PARAMS, _data(1, 1, 6)),
    },
    mistakes=(
        (
            "each step begins with the first state: pass the new state to the next step, as the carry",
            _loop(carried=False),
        ),
        ("the batches are used in reverse order", _loop(order=lambda n: list(reversed(range(n))))),
        ("each step uses the first batch: step i uses row i", _loop(order=lambda n: [0] * n)),
        ("each step uses the last batch: step i uses row i", _loop(order=lambda n: [n - 1] * n)),
        ("the state before the last step is returned: return the last carry", _loop(state_before=True)),
        ("only the last loss is returned: stack the losses of all steps", _loop(reduce=lambda losses: losses[-1])),
        ("the losses are averaged: return the loss of each step", _loop(reduce=lambda losses: losses.mean())),
        ("the losses are summed: return the loss of each step", _loop(reduce=lambda losses: losses.sum())),
        (
            "the losses are in reverse order: scan stacks them in the order of the steps",
            _loop(reduce=lambda losses: losses[::-1]),
        ),
    ),
    jit="arrays have no values there: jax.lax.scan(step, state, batches) needs none of them",
)


# devices


def _on_devices(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function once for each device: `vmap` with a named axis simulates the devices."""
    params, parts, loss_sum = args
    return jax.vmap(lambda part: function(params, part, loss_sum), axis_name="data")(parts)


@jax.jit
def _loss_sum(params: Any, part: Any) -> Any:
    """Compute the sum of the losses, and the number of labels other than -1."""
    x_BD, y_B = part
    return _losses(_logits(params, x_BD), y_B).sum(), (jnp.asarray(y_B) >= 0).sum()


def device_gradient(params: Any, part: Any, loss_sum: Callable[..., Any]) -> Any:
    (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
    sums = jax.lax.psum((total, grads, count), "data")
    total, grads, count = sums
    return total / count, jax.tree.map(lambda g: g / count, grads)


def _combined(loss: Callable[[Any, Any], Any], grads: Callable[[Any, Any], Any] | None = None) -> Callable[..., Any]:
    """Make an answer from functions that map a sum and the count of one device to the result."""

    def device_gradient(params: Any, part: Any, loss_sum: Callable[..., Any]) -> Any:
        (total, count), g = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
        return loss(total, count), jax.tree.map(lambda x: (grads or loss)(x, count), g)

    return device_gradient


def _divided_once(x: Any, count: Any) -> Any:
    return jax.lax.psum(x, "data") / jax.lax.psum(count, "data")


def _mean_of_means(x: Any, count: Any) -> Any:
    return jax.lax.pmean(x / count, "data")


def _parts(seed: int, *counts: int) -> tuple[Array, Array]:
    """Make four rows for each device. Only the first rows have labels: `counts` are the numbers of labels."""
    x_PBD, y_PB = _data(seed, len(counts), 4)
    y_PB[np.arange(4)[None] >= np.array(counts)[:, None]] = -1
    return x_PBD, y_PB


def _devices_agree(result: Any, *arguments: Any) -> str | None:
    for leaf in jax.tree.leaves(result):
        if not np.isfinite(leaf).all():
            return "a result is not finite (a device without labels gives 0 / 0): psum the sums and the counts, and divide once"
        if not np.allclose(leaf, leaf[:1], atol=1e-5):
            return "the devices hold different results: after a psum, each device holds the same sum"
    return None


_MEANS = (
    "is a mean of the devices' means, which weighs devices with few labels too much: psum sums and counts, divide once"
)

DEVICES = Exercise(
    name="devices",
    page="functions",
    statement="Compute the mean loss of a batch and its gradient on P devices. The function runs on each device at the same "
    "time, "
    'with its part of the batch, on the axis "data": jax.lax.psum(x, "data") adds x over the devices. loss_sum(params, part) '
    "returns the sum of the losses of this part and the number of its labels, which differs between devices and can be 0. "
    "Each device returns the results of the whole batch.",
    returns=("value", "grads"),
    reference=device_gradient,
    call=_on_devices,
    inputs=lambda: {
        "equal label counts": (_PARAMS, _parts(0, 4, 4, 4), _loss_sum),
        "unequal label counts": (_PARAMS, _parts(1, 4, 1, 3), _loss_sum),
        "a device without labels": (_PARAMS, _parts(2, 3, 0, 2), _loss_sum),
        "one device": (_PARAMS, _parts(3, 4), _loss_sum),
    },
    mistakes=(
        (f"loss and gradient {_MEANS}".replace("is a mean", "are a mean"), _combined(_mean_of_means)),
        (f"the gradient {_MEANS}", _combined(_divided_once, _mean_of_means)),
        (f"the loss {_MEANS}", _combined(_mean_of_means, _divided_once)),
        (
            "each device returns the results of its own part: psum the sums and the counts over the devices",
            _combined(lambda x, count: x / count),
        ),
        (
            "each device returns the gradient of its own part: psum it over the devices",
            _combined(_divided_once, lambda x, count: x / jax.lax.psum(count, "data")),
        ),
        (
            "the means of the devices are added, so the result grows with the number of devices: divide sums by counts once",
            _combined(lambda x, count: jax.lax.psum(x / count, "data")),
        ),
        (
            "the sums are not divided: divide loss and gradient by the psum of the counts",
            _combined(lambda x, count: jax.lax.psum(x, "data")),
        ),
        (
            "the gradient is not divided: divide it by the psum of the counts, too",
            _combined(_divided_once, lambda x, count: jax.lax.psum(x, "data")),
        ),
        (
            "the sums of all devices are divided by the count of one: psum the counts, too",
            _combined(lambda x, count: jax.lax.psum(x, "data") / count),
        ),
        (
            "the sums are averaged over devices (pmean), and divided by the sum of the counts: both need a psum",
            _combined(lambda x, count: jax.lax.pmean(x, "data") / jax.lax.psum(count, "data")),
        ),
    ),
    laws=(_devices_agree,),
)


# seeds


@jax.jit
def _init(seed: Any) -> Any:
    """Draw the parameters of a classifier; the seed may be traced."""
    keys = jax.random.split(jax.random.key(seed))
    return {"hidden": jax.random.normal(keys[0], (_D, _F)), "head": jax.random.normal(keys[1], (_F, _V))}


@partial(jax.jit, static_argnums=(0, 1))
def train_seeds(init: Callable[[Any], Any], step: Callable[[Any, Any], Any], seeds_S: Any, batch: Any) -> Any:
    params = jax.vmap(init)(jnp.asarray(seeds_S))
    return jax.vmap(step, in_axes=(0, None))(params, batch)


def _each_seed(
    seed_of: Callable[[Any, int], Any] = lambda seeds, i: seeds[i],
    carried: bool = False,
    before: bool = False,
    reduce: Callable[[Any], Any] = lambda losses: losses,
    average: bool = False,
) -> Callable[..., Any]:
    """Make a loop over seeds, correct by default; an argument adds a deliberate bug."""

    def train_seeds(init: Callable[[Any], Any], step: Callable[[Any, Any], Any], seeds_S: Any, batch: Any) -> Any:
        found, losses = [], []
        params = init(seed_of(seeds_S, 0))
        for i in range(len(seeds_S)):
            params = params if carried else init(seed_of(seeds_S, i))
            new, value = step(params, batch)
            found.append(params if before else new)
            losses.append(np.asarray(value))
            params = new
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
        if average:
            stacked = jax.tree.map(lambda x: x.mean(0), stacked)
        return stacked, reduce(np.stack(losses))

    return train_seeds


SEEDS = Exercise(
    name="seeds",
    page="compose",
    statement="Train S models at once, one for each seed: draw params with init(seed), and take one step(params, batch) -> "
    "(params, loss) with the same batch for all. Return the params of all models, stacked along a first axis S, and the "
    "losses [S]. The function is also called under jax.jit, with traced seeds.",
    returns=("params", "losses_S"),
    reference=train_seeds,
    inputs=lambda: {
        "4 seeds": (_init, _descend, np.array([3, 1, 4, 15], np.int32), _data(0, 6)),
        "6 seeds, as many as rows": (_init, _descend, np.array([2, 7, 1, 8, 28, 18], np.int32), _data(2, 6)),
    },
    mistakes=(
        ("all models have the same seed: map init over the seeds", _each_seed(seed_of=lambda seeds, i: seeds[0])),
        (
            "the seeds are replaced by 0, 1, 2, ...: pass the given seeds to init",
            _each_seed(seed_of=lambda seeds, i: np.int32(i)),
        ),
        (
            "each model continues from the model before it: every seed begins with its own init(seed)",
            _each_seed(carried=True),
        ),
        ("the parameters before the step are returned: return the new ones", _each_seed(before=True)),
        ("the losses are averaged: return the loss of each seed", _each_seed(reduce=lambda losses: losses.mean())),
        (
            "the parameters are averaged over the seeds: return the parameters of each seed, stacked",
            _each_seed(average=True),
        ),
    ),
    jit="the seeds have no values there: map init over them, jax.vmap(init)(seeds_S), and then "
    "jax.vmap(step, in_axes=(0, None))",
)


# examples


@jax.jit
def _loss_of_one(params: Any, x_D: Any, y: Any) -> Any:
    """Compute the loss of one example, a scalar."""
    if jnp.ndim(x_D) != 1:
        raise TypeError(f"loss_of_one takes one example, x [D]: it was called with x {list(jnp.shape(x_D))}")
    return _losses(_logits(params, x_D), y)


@partial(jax.jit, static_argnums=0)
def gradient_norms(loss_of_one: Callable[..., Any], params: Any, x_BD: Any, y_B: Any) -> Any:
    grads_B = jax.vmap(jax.grad(loss_of_one), in_axes=(None, 0, 0))(params, jnp.asarray(x_BD), jnp.asarray(y_B))
    return jax.vmap(_norm)(grads_B)


@jax.jit
def _gradients(params: Any, x_BD: Any, y_B: Any) -> Any:
    """Compute the gradients of each example with respect to the parameters and to x."""
    gradient = jax.grad(_loss_of_one, argnums=(0, 1))
    return jax.vmap(gradient, in_axes=(None, 0, 0))(params, x_BD, y_B)


def _squares(tree_B: Any) -> Array:
    """Compute the sum of the squares of each leaf and example, `[leaves, B]`."""
    return np.stack([np.square(np.asarray(x)).reshape(len(x), -1).sum(1) for x in jax.tree.leaves(tree_B)])


def _norms(norms: Callable[[Any], Any]) -> Callable[..., Any]:
    """Make an answer from a function that maps the gradients of all examples to norms."""
    return lambda loss_of_one, params, x_BD, y_B: norms(_gradients(params, x_BD, y_B)[0])


def _norm_of_the_mean(grads_B: Any) -> Any:
    mean = jax.tree.map(lambda g: np.asarray(g).mean(0, keepdims=True), grads_B)
    return np.sqrt(_squares(mean).sum())


EXAMPLES = Exercise(
    name="examples",
    page="compose",
    statement="Compute the norm of the gradient of each example. loss_of_one(params, x_D, y) is the loss of one example, a "
    "scalar. The norm is over all leaves together, sqrt(sum of the squares of all numbers). The function is also called under "
    "jax.jit.",
    returns=("norms_B",),
    reference=gradient_norms,
    inputs=lambda: {
        "6 examples": (_loss_of_one, _PARAMS, *_data(0, 6)),
        "1 example": (_loss_of_one, _PARAMS, *_data(1, 1)),
    },
    mistakes=(
        *(
            (
                "this is the norm of the mean gradient: map the gradient over the examples, then take the norm of each",
                answer,
            )
            for answer in (
                _norms(_norm_of_the_mean),
                _norms(lambda grads_B: np.full(len(grads_B["head"]), _norm_of_the_mean(grads_B))),
            )
        ),
        ("the root is missing: these are the squared norms", _norms(lambda grads_B: _squares(grads_B).sum(0))),
        (
            "the norms of the leaves are added: add their squares, then take the root",
            _norms(lambda grads_B: np.sqrt(_squares(grads_B)).sum(0)),
        ),
        (
            "this is the largest norm of a leaf: the norm is over all leaves together",
            _norms(lambda grads_B: np.sqrt(_squares(grads_B)).max(0)),
        ),
        *(
            (
                "this is the norm of one leaf only: the norm is over all leaves together",
                _norms(lambda grads_B, leaf=leaf: np.sqrt(_squares(grads_B[leaf])[0])),
            )
            for leaf in ("hidden", "head")
        ),
        (
            "these are sums of absolute values: the norm is the root of the sum of squares",
            _norms(lambda grads_B: sum(np.abs(x).reshape(len(x), -1).sum(1) for x in jax.tree.leaves(grads_B))),
        ),
        (
            "the norms are divided by B: each is the norm of its own loss, not of its part of the mean",
            _norms(lambda grads_B: np.sqrt(_squares(grads_B).sum(0)) / len(grads_B["head"])),
        ),
        (
            "these are gradients with respect to x: differentiate with respect to the parameters",
            lambda loss_of_one, params, x_BD, y_B: np.sqrt(_squares(_gradients(params, x_BD, y_B)[1])[0]),
        ),
    ),
    jit="arrays have no values there: jax.vmap(jax.grad(loss_of_one), in_axes=(None, 0, 0)) needs none of them",
)


# hvp


@partial(jax.jit, static_argnums=0)
def hvp(f: Callable[[Any], Any], w: Any, v: Any) -> Any:
    w, v = jax.tree.map(jnp.asarray, (w, v))
    return jax.jvp(jax.grad(f), (w,), (v,))[1]


@cache
def _derivatives(f: Callable[[Any], Any], structure: Any, shapes: tuple[tuple[int, ...], ...], data: bytes) -> Any:
    """Compute the gradient `[N]` and the Hessian `[N, N]` of f with respect to the flattened tree in `data`."""
    zeros = jax.tree.unflatten(structure, [np.zeros(shape, np.float32) for shape in shapes])
    _, unravel = jax.flatten_util.ravel_pytree(zeros)

    def of_flat(w_N: Any) -> Any:
        return f(unravel(w_N))

    derivatives = jax.jit(lambda w_N: (jax.grad(of_flat)(w_N), jax.hessian(of_flat)(w_N)))
    return jax.tree.map(np.asarray, derivatives(np.frombuffer(data, np.float32)))


def _flat(product: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Make an answer from a function of the gradient `[N]`, the Hessian `[N, N]` and v `[N]`."""

    def hvp(f: Callable[[Any], Any], w: Any, v: Any) -> Any:
        leaves, structure = jax.tree.flatten(w)
        shapes = tuple(leaf.shape for leaf in leaves)
        w_N, v_N = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (w, v))
        gradient_N, hessian_NN = _derivatives(f, structure, shapes, w_N.tobytes())
        found_N = product(gradient_N, hessian_NN, v_N)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(found_N, ends), shapes, strict=True)]
        return jax.tree.unflatten(structure, parts)

    return hvp


_gradient_of = jax.jit(lambda f, w: jax.grad(f)(w), static_argnums=0)


def _quartic(x_D: Any) -> Any:
    """Compute a function with a non-diagonal Hessian that depends on x."""
    x_D = jnp.asarray(x_D)
    return (x_D**4).sum() / 4 + x_D[:-1] @ x_D[1:] + x_D[0] * (x_D**2).sum()


def _classifier(params: Any) -> Any:
    return _mean_loss(params, _data(5, 6))


HVP = Exercise(
    name="hvp",
    page="compose",
    statement="Compute the product of the Hessian of f with a direction, H v: the derivative of the gradient of f at w "
    "along v. f maps a tree to a scalar; w, v and the result are trees of the same structure. Do not build "
    "the Hessian: jax.jvp(jax.grad(f), ...). The function is also called under jax.jit.",
    returns=("Hv",),
    reference=hvp,
    inputs=lambda: {
        "a polynomial of 5 numbers": (_quartic, normal(0, 5), normal(1, 5)),
        "the loss of a classifier": (_classifier, _PARAMS, {"hidden": normal(2, _D, _F), "head": normal(3, _F, _V)}),
        "a direction of zeros": (_quartic, normal(4, 5), np.zeros(5, np.float32)),
    },
    mistakes=(
        ("this is the gradient: differentiate it once more, along v", _flat(lambda g, H, v: g)),
        (
            "this is the gradient times v, element by element: differentiate the gradient along v",
            _flat(lambda g, H, v: g * v),
        ),
        (
            "this is g (g v), the outer product of the gradient: differentiate the gradient along v",
            _flat(lambda g, H, v: g * (g @ v)),
        ),
        (
            "v is ignored: this is the gradient of the sum of the gradient, so v is all ones; take the sum of gradient times v",
            _flat(lambda g, H, v: H @ np.ones_like(v)),
        ),
        (
            "this is the diagonal of the Hessian times v: each row of H v is a sum over the row of H",
            _flat(lambda g, H, v: np.diag(H) * v),
        ),
        (
            "this is the gradient of f at w + v: take the derivative along v, the second result of jax.jvp",
            lambda f, w, v: _gradient_of(f, jax.tree.map(np.add, w, v)),
        ),
        (
            "this is the gradient at w + v minus the gradient at w: take the derivative along v, with jax.jvp",
            lambda f, w, v: jax.tree.map(np.subtract, _gradient_of(f, jax.tree.map(np.add, w, v)), _gradient_of(f, w)),
        ),
        ("the factor is wrong: H v, not H v / 2", _flat(lambda g, H, v: H @ v / 2)),
    ),
    jit="arrays have no values there: jax.jvp(jax.grad(f), (w,), (v,)) needs none of them",
)
