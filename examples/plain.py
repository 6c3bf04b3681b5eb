"""A decoder-only transformer in one file of jax.numpy: weights, logits, loss, AdamW, sampling.

Read this file first. It computes the same functions as the package (tests/test_plain.py), without the parts that make the
package fast, general and safe; docs/code.md continues from here. Each character is a token.

python examples/plain.py [TEXT]    # train on a file, by default this one, and print a sample

The letters at the end of a name are dimensions: B batch, T positions, D width, N heads, H head width, V vocabulary; T1: T + 1.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxgpt  # noqa: F401  # sets an XLA flag: without it, jax 0.10 to 0.12 miscompile some sums on CPUs


class Config(NamedTuple):
    """Sizes of the model, and settings of training."""

    vocab_size: int
    block_size: int = 64  # context, in tokens
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    batch_size: int = 16
    steps: int = 300
    learning_rate: float = 3e-3  # peak learning rate
    min_lr: float = 3e-4  # final learning rate
    warmup_steps: int = 30
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # maximum global norm of the gradient


class State(NamedTuple):
    """Train state: weights, the first and second moments of AdamW, and the number of steps taken."""

    params: Any
    m: Any
    v: Any
    step: jax.Array


# The weights: a dictionary of arrays.


def init_params(c: Config, key: jax.Array) -> Any:
    """Draw weights from N(0, 0.02^2); biases are 0 and scales 1.

    The matrices that write to the residual stream are divided by sqrt(2 n_layer).
    """
    keys = iter(jax.random.split(key, 2 + 6 * c.n_layer))

    def linear(inputs: int, outputs: int, std: float = 0.02) -> Any:
        return {"kernel": std * jax.random.normal(next(keys), (inputs, outputs)), "bias": jnp.zeros(outputs)}

    def table(rows: int) -> Any:
        return {"embedding": 0.02 * jax.random.normal(next(keys), (rows, D))}

    D, small = c.n_embd, 0.02 / (2 * c.n_layer) ** 0.5
    norm = {"scale": jnp.ones(D), "bias": jnp.zeros(D)}
    params = {"wte": table(c.vocab_size), "wpe": table(c.block_size), "ln_f": norm}
    for layer in range(c.n_layer):
        attn = {
            name: linear(D, D, small if name == "o_proj" else 0.02) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        mlp = {"up_proj": linear(D, 4 * D), "down_proj": linear(4 * D, D, small)}
        params[f"h_{layer}"] = {"ln_1": norm, "attn": attn, "ln_2": norm, "mlp": mlp}
    return params


# The model: ids -> logits.


def linear(x: jax.Array, p: Any) -> jax.Array:
    """Compute `x W + b`."""
    return x @ p["kernel"] + p["bias"]


def norm(x: jax.Array, p: Any) -> jax.Array:
    """Apply layer norm: normalize each vector to mean 0 and variance 1, then apply scale and bias."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def attend(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> jax.Array:
    """Compute causal attention: average values up to each position with weights softmax(q k^T / sqrt(H))."""
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    scores_BNTT = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) / H**0.5
    scores_BNTT = jnp.where(jnp.tri(T, dtype=bool), scores_BNTT, -jnp.inf)  # the causal mask
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores_BNTT), v_BTNH)


def block(c: Config, x_BTD: jax.Array, p: Any) -> jax.Array:
    """Add the output of attention, then of the MLP, to the residual stream."""
    y_BTD = norm(x_BTD, p["ln_1"])
    heads = (*x_BTD.shape[:2], c.n_head, c.n_embd // c.n_head)
    q, k, v = (linear(y_BTD, p["attn"][f"{name}_proj"]).reshape(heads) for name in "qkv")
    x_BTD = x_BTD + linear(attend(q, k, v).reshape(x_BTD.shape), p["attn"]["o_proj"])
    hidden = jax.nn.gelu(linear(norm(x_BTD, p["ln_2"]), p["mlp"]["up_proj"]))
    return x_BTD + linear(hidden, p["mlp"]["down_proj"])


def logits(c: Config, params: Any, ids_BT: jax.Array) -> jax.Array:
    """Compute the logits of the next token at each position, `[B, T, V]`."""
    x_BTD = params["wte"]["embedding"][ids_BT] + params["wpe"]["embedding"][: ids_BT.shape[1]]
    for layer in range(c.n_layer):
        x_BTD = block(c, x_BTD, params[f"h_{layer}"])
    return norm(x_BTD, params["ln_f"]) @ params["wte"]["embedding"].T  # tied output head: the token table


# Training: (state, batch) -> (state, loss).


def loss(c: Config, params: Any, windows_BT1: jax.Array) -> jax.Array:
    """Compute the mean of -log p(next token), in nats, over windows of T + 1 tokens."""
    log_p_BTV = jax.nn.log_softmax(logits(c, params, windows_BT1[:, :-1]))
    return -jnp.take_along_axis(log_p_BTV, windows_BT1[:, 1:, None], axis=-1).mean()


def learning_rate(c: Config, step: jax.Array) -> jax.Array:
    """Compute the learning rate: linear warm-up over `warmup_steps`, then a cosine down to `min_lr`."""
    progress = jnp.clip((step - c.warmup_steps) / (c.steps - c.warmup_steps), 0, 1)
    cosine = c.min_lr + (c.learning_rate - c.min_lr) * (1 + jnp.cos(jnp.pi * progress)) / 2
    return jnp.where(step < c.warmup_steps, c.learning_rate * (step + 1) / (c.warmup_steps + 1), cosine)


def init_state(c: Config, key: jax.Array) -> State:
    """Create the initial train state."""
    params = init_params(c, key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return State(params, zeros, zeros, jnp.int32(0))


@partial(jax.jit, static_argnums=0)
def train_step(c: Config, state: State, windows_BT1: jax.Array) -> tuple[State, jax.Array]:
    """Take a step of AdamW with a clipped gradient; return the new state, and the loss before the step."""
    value, grads = jax.value_and_grad(partial(loss, c))(state.params, windows_BT1)
    size = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, c.grad_clip / size), grads)
    step, rate = state.step + 1, learning_rate(c, state.step)
    m = jax.tree.map(lambda m, g: c.beta1 * m + (1 - c.beta1) * g, state.m, grads)
    v = jax.tree.map(lambda v, g: c.beta2 * v + (1 - c.beta2) * g**2, state.v, grads)

    def update(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - c.beta1**step), v / (1 - c.beta2**step)  # bias correction
        decay = c.weight_decay if w.ndim > 1 else 0  # weight decay of matrices and tables only
        return w - rate * (m / (jnp.sqrt(v) + 1e-8) + decay * w)

    return State(jax.tree.map(update, state.params, m, v), m, v, step), value


def batch(c: Config, ids: jax.Array, step: int) -> jax.Array:
    """Sample the windows of a step, `[B, T + 1]`, with a key derived from the step."""
    key = jax.random.fold_in(jax.random.key(0), step)
    first_B = jax.random.randint(key, (c.batch_size,), 0, len(ids) - c.block_size)
    return ids[first_B[:, None] + jnp.arange(c.block_size + 1)]


# Sampling: prompt -> text.


@partial(jax.jit, static_argnums=0)
def next_logits(c: Config, params: Any, ids_T: jax.Array, length: jax.Array) -> jax.Array:
    """Compute the logits of the token after the first `length` ids; the mask hides later padding."""
    return logits(c, params, ids_T[None])[0, length - 1]


def sample(c: Config, params: Any, ids: list[int], n: int, key: jax.Array, temperature: float = 1.0) -> list[int]:
    """Append n tokens sampled from the model's probabilities; temperature 0: the most probable tokens."""
    for i in range(n):
        seen = ids[-c.block_size :]
        padded = jnp.array(seen + [0] * (c.block_size - len(seen)))
        logits_V = next_logits(c, params, padded, len(seen))
        drawn = (
            logits_V / temperature + jax.random.gumbel(jax.random.fold_in(key, i), logits_V.shape)
            if temperature
            else logits_V
        )
        ids = [*ids, int(drawn.argmax())]
    return ids


def main(path: str) -> None:
    text = Path(path).read_text("utf-8")
    alphabet = sorted(set(text))
    ids = jnp.array([alphabet.index(character) for character in text])
    c = Config(vocab_size=len(alphabet))
    state = init_state(c, jax.random.key(0))
    for step in range(c.steps):
        state, value = train_step(c, state, batch(c, ids, step))
        if step % 50 == 0 or step == c.steps - 1:
            print(f"step {step:3}  loss {value:.3f}")
    prompt = text[: c.block_size // 2]
    new = sample(c, state.params, [alphabet.index(character) for character in prompt], 200, jax.random.key(1), 0.8)
    print("".join(alphabet[i] for i in new))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else __file__)
