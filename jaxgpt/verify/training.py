"""Laws of training and files: remat, microbatches, devices, compilation, resume, round trips."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.config import Config, MeshConfig, OptimConfig
from jaxgpt.convert.open_model import read_model
from jaxgpt.errors import UserError
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.lm import load
from jaxgpt.model import GPT
from jaxgpt.model.params import flatten_params
from jaxgpt.model.scan import ScannedGPT, stack_layers, unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.parallel.mesh import make_mesh, resolve
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.build import make_program, with_arrays
from jaxgpt.verify.subject import ROWS, NotApplicable, Subject, distance


def remat(s: Subject, policy: Literal["dots", "full"]) -> float:
    """Compare loss and gradient with and without rematerialization."""
    return distance(s.compiled_gradient(s.model.clone(remat=POLICIES[policy])), s.plain_gradient)


def operations(s: Subject) -> float:
    """Compare loss and gradient between the operations that training uses and the reference definitions."""
    return distance(s.plain_gradient, s.compiled_gradient(GPT(s.config.model, Ops())))


def scanned(s: Subject) -> float:
    """Compare loss and gradient between a scan over stacked layers and unrolled layers."""
    c = s.config.model
    if len(set(c.windows)) > 1:
        raise NotApplicable(f"needs the same sliding window in all layers: model.window_pattern is {c.window_pattern}")
    model = ScannedGPT(c, s.model.ops)
    stacked = jax.jit(lambda params, windows: s.gradient(model, params, windows))
    means, gradient = stacked(stack_layers(s.params), s.windows)
    return distance((means, unstack_layers(gradient, c.n_layer)), s.plain_gradient)


def accumulation(s: Subject) -> float:
    """Compare loss and gradient between one batch and four microbatches with different token counts."""
    return distance(s.compiled_gradient(s.model, accumulation=4), s.plain_gradient)


def compiled(s: Subject) -> float:
    """Compare loss and gradient with and without jit."""
    with_jit = s.plain_gradient  # computed before jit is disabled
    with jax.disable_jit():
        without_jit = s.gradient(s.model, s.params, s.windows)
    return distance(with_jit, without_jit)


def devices(s: Subject) -> float:
    """Compare a train step on several devices to the same step on one device.

    The optimizer is Adam with betas of 0 and an epsilon of 1: for small gradients, its update `lr * g / (|g| + 1)` is
    nearly proportional to g. The usual `lr * g / |g|` would turn rounding errors of vanishing gradients into full-size updates.
    """
    available = jax.devices()
    if len(available) < 2:
        with suppress(RuntimeError):  # error if JAX_PLATFORMS excludes the CPU
            available = jax.devices("cpu")
    if len(available) < 2:
        raise NotApplicable("needs at least 2 devices: set JAX_NUM_CPU_DEVICES=8")

    plain: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "grad_clip": 0.0}
    smooth = OptimConfig(learning_rate=1000.0, beta1=0.0, beta2=0.0, eps=1.0, **plain)
    config = replace(s.config, optim=smooth, train=replace(s.config.train, batch_size=ROWS))
    windows = np.asarray(s.random_ids((ROWS, s.windows.shape[1])))
    params = jax.device_get(s.params)

    def update(mesh: MeshConfig) -> tuple[Any, Any]:
        program = with_arrays(make_program(replace(config, mesh=mesh), make_mesh(mesh, available)))
        state, metrics = program.step(program.init(params), program.put(windows))
        change = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, params)
        return change, jax.device_get((metrics["loss"], metrics["grad_norm"]))

    one = update(MeshConfig(data=1))
    many = update(_split(config, len(available)))
    return max(distance(a, b) for a, b in zip(many, one, strict=True))


def resumed(s: Subject) -> float:
    """Train four steps; repeat the last two from the checkpoint of step 2, and compare the final states.

    Dropout and an EMA are enabled, so that a resume must restore every part of the state.
    """
    config = s.config.with_model(dropout=0.1)
    train = replace(config.train, batch_size=ROWS)
    config = replace(config, train=train, optim=replace(config.optim, ema_decay=0.9), mesh=MeshConfig(data=1))
    program = with_arrays(make_program(config, make_mesh(config.mesh)))
    windows = np.asarray(s.random_ids((4, ROWS, s.windows.shape[1])))

    def steps(state: TrainState, batches: np.ndarray) -> TrainState:
        for batch in batches:
            state, _ = program.step(state, program.put(batch))
        return state

    middle = steps(program.init(jax.device_get(s.params)), windows[:2])
    directory = s.directory / "checkpoints"
    with Saver(directory, config.train) as saver:
        saver.save(program.to_checkpoint(middle), Info(2))
    straight = jax.device_get(steps(middle, windows[2:]))
    return distance(steps(program.restore(directory, 2), windows[2:]), straight)


def _split(config: Config, n_devices: int) -> MeshConfig:
    """Return a mesh of up to 8 devices that uses as many axes as the device count and the model allow."""
    n = max(n for n in (2, 4, 8) if n <= n_devices)
    for fsdp, tensor in ((2, 2), (2, 1), (1, 2)):
        with suppress(UserError):
            return resolve(replace(config, mesh=MeshConfig(data=-1, fsdp=fsdp, tensor=tensor)), n)[0]
    return MeshConfig(data=n)


def fused_reductions(s: Subject) -> float:
    """Compare the sums of `(E C)_ij E_ij` over i, and over j, for random E and constant C, to NumPy in float64.

    XLA's CPU backend can miscompile these fused reductions.
    """

    @partial(jax.jit, static_argnums=1)
    def reduction(E: jax.Array, axis: int) -> jax.Array:
        return jnp.sum((E @ jnp.full_like(E, 0.5)) * E, axis)

    E = np.random.Generator(np.random.Philox(0)).standard_normal((128, 128), np.float32)
    product = (E.astype(np.float64) @ np.full((128, 128), 0.5)) * E
    return max(distance(reduction(jnp.asarray(E), axis), product.sum(axis)) for axis in (0, 1))


def saved(s: Subject) -> float:
    """Save the model as a run, load the run, and compare the weights."""
    return distance(load(s.saved).params, s.params)


def exported(s: Subject) -> float:
    """Export for transformers, import again and compare the weights.

    The export may contain additional weights: ones and zeros for gains and biases that this model lacks.
    """
    back = flatten_params(read_model(s.exported).params)
    ours = flatten_params(s.params)
    return distance({path: back[path] for path in ours}, ours)


def transformers(s: Subject) -> float:
    """Compare the logits with the logits that transformers computes from the exported model."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotApplicable(f"{' and '.join(missing)} not installed")
    directory = s.exported
    import torch
    import transformers as library  # not this function

    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model: Any = library.AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        logits = model(torch.tensor(np.asarray(s.tokens, np.int64))).logits.numpy()
    return distance(s.forward(s.params, s.tokens), logits)
