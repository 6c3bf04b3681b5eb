"""One optimizer step: a pure function of state and batch, which the caller compiles and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgpt.ops.random import named_key, subkey
from jaxgpt.train.loss import Objective, RowSums
from jaxgpt.train.skip import SkipStatistics, init_statistics, should_apply

# The metrics that a step adds to the means of the objective's sums. The sums must have different names.
STEP_METRICS = ("loss", "grad_norm", "grad_squares", "skipped", "skipped_in_a_row")


class Sums(NamedTuple):
    """The fields of `RowSums`, without the penalty, summed over the rows of a batch."""

    loss: jax.Array
    counted: jax.Array
    others: Mapping[str, jax.Array]


class TrainState(NamedTuple):
    """The arrays that a step changes.

    Attributes:
        step: int32, number of steps taken, including skipped updates.
        params: trained parameters (weights or adapters), float32.
        opt_state: state of the optax optimizer.
        ema: exponential moving average (EMA) of `params`, or None.
        skip: running statistics that decide whether an update is skipped; None: apply every update, even non-finite ones.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any = None
    skip: SkipStatistics | None = None

    @property
    def eval_params(self) -> Any:
        """The parameters for evaluation and sampling: the EMA if it is not None, otherwise `params`."""
        return self.params if self.ema is None else self.ema


def init_state(
    params: Any, optimizer: optax.GradientTransformation, ema: bool = False, skip: bool = False
) -> TrainState:
    """Make the initial train state.

    Args:
        params: initial values of the trained parameters (weights or adapters), float32.
        optimizer: any optax transformation.
        ema: whether to keep an EMA of `params`.
        skip: whether to skip bad updates (`should_apply`).
    """
    average = jax.tree.map(jnp.copy, params) if ema else None
    # Copy, because some optimizers store the given arrays, and an array cannot be donated twice.
    opt_state = jax.tree.map(jnp.copy, optimizer.init(params))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=opt_state,
        ema=average,
        skip=init_statistics() if skip else None,
    )


def gradient_sums(
    params: Any, batch: Any, key: jax.Array | None, frozen: Any = (), *, objective: Objective, accumulation: int = 1
) -> tuple[Any, Sums]:
    """Compute the gradient of the summed loss and penalty, in microbatches, and the objective's sums over all rows.

    Raises:
        ValueError: if the number of microbatches does not divide the number of rows.
    """

    def total(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        # If rows are sharded over devices, the compiler all-reduces this sum and the gradients.
        rows = RowSums(*objective(params, batch, key, frozen))
        sums = jax.tree.map(lambda x: x.sum(0), rows)
        return sums.minimized, Sums(sums.loss_B, sums.count_B, sums.others)

    grad: Callable[..., tuple[Any, Sums]] = jax.grad(total, has_aux=True)
    if accumulation == 1:
        return grad(params, batch, subkey(key, 0))

    rows = len(jax.tree.leaves(batch)[0])
    if rows % accumulation:
        raise ValueError(f"{rows} rows cannot be split into {accumulation} equal microbatches")

    # Each device holds consecutive rows, and microbatch r % accumulation takes row r, so every device keeps its rows.
    def divide(x: jax.Array) -> jax.Array:
        consecutive = x.reshape(-1, accumulation, *x.shape[1:])
        return consecutive.swapaxes(0, 1)

    microbatches = jax.tree.map(divide, batch)

    def add(sums: Any, microbatch: tuple[Any, jax.Array]) -> tuple[Any, None]:
        part, index = microbatch
        new = grad(params, part, subkey(key, index))
        return jax.tree.map(jnp.add, sums, new), None

    first = jax.tree.map(lambda x: x[0], microbatches)
    shapes = jax.eval_shape(grad, params, first, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, _ = jax.lax.scan(add, zeros, (microbatches, jnp.arange(accumulation)))
    return sums


def gradients(
    params: Any, batch: Any, key: jax.Array | None, frozen: Any = (), *, objective: Objective, accumulation: int = 1
) -> tuple[dict[str, jax.Array], Any]:
    """Compute the means of the objective's loss and other sums as metrics, and the gradient of the mean loss plus penalty."""
    grads, sums = gradient_sums(params, batch, key, frozen, objective=objective, accumulation=accumulation)
    return mean_gradients(grads, sums)


def mean_gradients(grads: Any, sums: Sums) -> tuple[dict[str, jax.Array], Any]:
    """Divide the results of `gradient_sums` by the count: means as metrics, and the gradient of the mean loss plus penalty.

    Sums are added over microbatches and devices, and divided once. Without dropout, the number of microbatches or devices
    therefore changes the result only by rounding.

    Raises:
        ValueError: if a sum of the objective has the name of a metric in `STEP_METRICS`.
    """
    check_names(sums.others, STEP_METRICS)
    count = jnp.where(sums.counted == 0, 1, sums.counted)  # zero loss and gradients without targets
    totals = {"loss": sums.loss, **sums.others}
    means = {name: total / count for name, total in totals.items()}
    inverse = 1 / count  # some compilers fuse a product with the next operations, but write a quotient to memory
    return means, jax.tree.map(lambda g: g * inverse, grads)


def check_names(sums: Iterable[str], taken: Iterable[str]) -> None:
    """Raise `ValueError` if a sum of an objective has a name in `taken`, the names of other metrics."""
    found = set(sums) & set(taken)
    if found:
        raise ValueError(f"sums of an objective must not have the names of other metrics: {sorted(found)}")


def squared_norms(grads: Any) -> jax.Array:
    """Compute the squared norm of each gradient, float32 `[leaves]`."""
    return jnp.stack([jnp.square(g.astype(jnp.float32)).sum() for g in jax.tree.leaves(grads)])


def dropout_key(state: TrainState, seed: int | None) -> jax.Array | None:
    """Return the random key of the dropout masks of the next step, a function of (seed, step); None: no dropout."""
    return None if seed is None else named_key(seed, "dropout", state.step)


def apply_gradients(
    state: TrainState,
    grads: Any,
    metrics: dict[str, jax.Array],
    *,
    optimizer: optax.GradientTransformation,
    ema_decay: float = 0.0,
    spike_factor: float = 0.0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state with the results of `mean_gradients`. Arguments, results and errors as for `train_step`."""
    if bool(ema_decay) != (state.ema is not None):
        raise ValueError(
            f"ema_decay {ema_decay:g} does not match the state: pass ema=True to init_state if ema_decay is above 0"
        )
    if spike_factor and state.skip is None:
        raise ValueError(f"spike_factor {spike_factor:g} needs a state with statistics: pass skip=True to init_state")

    squares = squared_norms(grads)
    metrics = {**metrics, "grad_norm": jnp.sqrt(squares.sum()), "grad_squares": squares}

    # Compute the optimizer's update.
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, state.opt_state, state.params, value=metrics["loss"])
    params = optax.apply_updates(state.params, updates)
    new = state._replace(params=params, opt_state=opt_state)

    # Update the moving average of the parameters.
    if state.ema is not None:
        ema = jax.tree.map(lambda mean, x: ema_decay * mean + (1 - ema_decay) * x, state.ema, new.params)
        new = new._replace(ema=ema)

    # A bad update changes only the statistics and the step.
    if state.skip is not None:
        applied, skip = should_apply(state.skip, metrics["loss"], metrics["grad_norm"], spike_factor)
        kept = jax.tree.map(partial(jnp.where, applied), new, state)
        new = kept._replace(skip=skip)
        metrics = {**metrics, "skipped": skip.total, "skipped_in_a_row": skip.in_a_row}
    return new._replace(step=state.step + 1), metrics


def train_step(
    state: TrainState,
    batch: Any,
    frozen: Any = (),
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    dropout_seed: int | None = None,
    accumulation: int = 1,
    ema_decay: float = 0.0,
    spike_factor: float = 0.0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take one optimizer step: a pure function `(state, batch, frozen) -> (state, metrics)`.

    Compile with `jax.jit(partial(train_step, objective=next_token_loss(model.apply), optimizer=optimizer))`. The new state
    has the structure, shapes and dtypes of `state`, which can therefore be donated (`donate_argnums=0`).

    Args:
        state: current state, from `init_state` with the same optimizer or from the previous step.
        batch: argument of the objective: any tree of arrays with rows as their first axis.
        frozen: argument of the objective: any tree of arrays that are read, but not trained.
        objective: `next_token_loss(...)`, or any `Objective`.
        optimizer: an optax transformation, including clipping. Its `update` receives one extra argument, the loss as `value`.
        dropout_seed: seed of the dropout masks, which are a function of (seed, step, microbatch); None: no dropout.
        accumulation: number of equal microbatches of the rows, which `parallel.rows.microbatches` derives from
            `train.accumulation`. Without dropout, it changes results only by rounding.
        ema_decay: decay of the EMA, `ema <- ema_decay * ema + (1 - ema_decay) * params`; 0: the state has no EMA.
        spike_factor: if the state has statistics, skip non-finite updates, and updates with a loss or gradient norm above
            this factor times its running mean (`should_apply`); 0: skip only non-finite updates. A skipped update changes
            neither `params` nor the EMA nor the optimizer state, including its schedules.

    Returns:
        The new state, and the metrics: `loss` (mean before the update) and the objective's other means, `grad_norm` (before
        clipping) and `grad_squares` (squared norm of each gradient, `[leaves]`). If the state has statistics to skip bad
        updates, the metrics include the counts `skipped` (in total) and `skipped_in_a_row`.

    Raises:
        ValueError: if `accumulation` does not divide the number of rows, `ema_decay` or `spike_factor` does not match the
            state, or a sum of the objective has the name of another metric.
    """
    key = dropout_key(state, dropout_seed)
    metrics, grads = gradients(state.params, batch, key, frozen, objective=objective, accumulation=accumulation)
    return apply_gradients(state, grads, metrics, optimizer=optimizer, ema_decay=ema_decay, spike_factor=spike_factor)
