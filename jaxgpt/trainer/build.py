"""Build the program of a config: the mesh, then shapes and functions, then the arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.kernels import best, choose_attention, in_balanced_order
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.model import GPT
from jaxgpt.model.scan import ScannedGPT
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import attend
from jaxgpt.parallel.host import precision_note
from jaxgpt.parallel.mesh import make_mesh, resolve
from jaxgpt.parallel.processes import process_count
from jaxgpt.parallel.rules import RULES, Rules, change_rules, replicated
from jaxgpt.runtime import set_quick_flag
from jaxgpt.train.adapters import with_adapters
from jaxgpt.train.loss import Objective, next_token_loss
from jaxgpt.train.side_outputs import router_penalties
from jaxgpt.trainer.frozen_arrays import frozen_arrays, frozen_shapes
from jaxgpt.trainer.given import parts_of_build
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.run_step import host_hyperparameters
from jaxgpt.trainer.states import abstract, fresh


def build(
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | None = None,
    frozen: Any = None,
    frozen_model: ModelConfig | None = None,
    model: GPT | None = None,
    objective: Objective | None = None,
    objective_of: Callable[[GPT], Objective] | None = None,
    ops: Ops | None = None,
) -> Program:
    """Build the program of a config on the available devices.

    Args:
        config: settings of the run, with `model.vocab_size` set.
        optimizer: optax transformation to use instead of the optimizer of `config.optim`, which then sets only `ema_decay`,
            the skipping of updates and the penalties of routers. The metrics then have no `lr`. With `train.scan_layers`,
            the optimizer receives one array for each weight of a block, stacked over the layers.
        rules: changes to the sharding table (`jaxgpt.parallel.rules.RULES`), from logical axis to mesh axes: `{"length":
            ("tensor",)}` shards the activations between blocks along the sequence. Losses match a single device up to rounding.
        frozen: any tree of arrays that the objective reads, but that are not trained, with unstacked layers: with `lora.rank`,
            the base weights (None: random weights), or a `train.adapters.FrozenParts` of base weights and other arrays;
            otherwise, for example, a reference model. The arrays are sharded as by `shardings_like`. It may be a function from
            a `Place` to weights of the model, which reads them with their shardings.
        frozen_model: architecture of the weights that the function `frozen` reads; None: the trained model's.
        model: module to train instead of `GPT(config.model, ...)`, with weights of the same names; with `train.scan_layers`,
            a `ScannedGPT` (`model/scan.py`). The default objective calls its methods `hidden_and_sides` and `head`.
        objective: objective to use instead of `next_token_loss`, with the penalties of `router_penalties`;
            with `lora.rank`, it receives the merged weights as `params`, and `FrozenParts.of_objective` as `frozen`.
        objective_of: function from the model, with the operations of the mesh, to the objective; instead of `objective`.
        ops: operations to use instead of `jaxgpt.kernels.best(config, mesh)`.

    Raises:
        UserError: if a rule is invalid (see `change_rules`); if a rule, the mesh or a setting does not fit the devices, the
            batch or the model; or if `post.objective` needs an objective that is not given.
    """
    if config.post.objective != "next-token" and objective is None and objective_of is None:
        raise UserError(
            f"post.objective {config.post.objective} needs its objective: pass build=jaxgpt.post.start.build_program, or an "
            f"objective"
        )

    # Make the mesh, and reject settings that do not fit the mesh.
    set_quick_flag()  # before JAX's first use of a device
    sizes, mesh_note = resolve(config, jax.device_count(), process_count(), jax.default_backend() == "tpu")
    mesh = make_mesh(sizes)
    device = mesh.devices.flat[0]
    check_remat(config.train.remat, device)
    _check_parts(config, model, ops)

    # Make the shapes and functions.
    program = make_program(
        config,
        mesh,
        optimizer=optimizer,
        rules=change_rules(rules or {}),
        frozen=frozen,
        frozen_model=frozen_model,
        model=model,
        objective=objective,
        objective_of=objective_of,
        ops=ops,
    )

    # Collect the advice for the user.
    kernel_note = ""
    if ops is None and model is None:
        kernel_note = choose_attention(config, device).note
    notes = (
        mesh_note,
        kernel_note,
        precision_note(config.train.compute_dtype, device),
        replicated_note(program.abstract.state.opt_state, mesh),
    )
    program = replace(program, note="; ".join(filter(None, notes)))
    return with_arrays(program, frozen)


def make_program(
    config: Config,
    mesh: Mesh,
    *,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules = RULES,
    frozen: Any = None,
    frozen_model: ModelConfig | None = None,
    model: GPT | None = None,
    objective: Objective | None = None,
    objective_of: Callable[[GPT], Objective] | None = None,
    ops: Ops | None = None,
) -> Program:
    """Make the program of a config on a mesh of this machine's devices, or of planned hardware. `build` adds the arrays.

    Arguments as for `build`, except that `rules` is the complete sharding table, and `frozen` may be abstract.
    """
    ops = ops or best(config, mesh)
    given = parts_of_build(config, model, objective, objective_of, optimizer)

    # Compute the shapes.
    make = jax.jit(partial(fresh, config=config, model=model, optimizer=optimizer))
    shapes = jax.eval_shape(make, 0)
    arrays = abstract(config, mesh, rules, shapes, frozen_shapes(config, shapes, frozen, frozen_model))

    # Make the functions.
    is_given = model is not None
    if model is None:
        cls = ScannedGPT if config.train.scan_layers else GPT
        model = cls(config.model, ops, POLICIES[config.train.remat])
    if objective_of is not None:
        objective = objective_of(model)
    if objective is None:
        objective = _next_token_objective(config, model, may_reorder=not is_given)
    if config.lora.rank:
        objective = with_adapters(objective, config.lora.alpha)

    return Program(
        config=config,
        mesh=mesh,
        rules=rules,
        ops=ops,
        model=model,
        objective=objective,
        optimizer=optimizer,
        abstract=arrays,
        fresh=make,
        hyperparameters=host_hyperparameters(config),
        given=given,
    )


def _next_token_objective(config: Config, model: GPT, may_reorder: bool) -> Objective:
    """Make the default objective; `may_reorder`: the model may receive the tokens in a different order (`mesh.context`)."""
    order = None
    if may_reorder:
        ops, order = in_balanced_order(config, model.ops)
        model = model.clone(ops=ops)
    return next_token_loss(model.apply, config.train.loss_chunk, router_penalties(config), order)


def with_arrays(program: Program, frozen: Any = None) -> Program:
    """Return a program with its arrays on the devices: `frozen` as in `build`, and the hyperparameters."""
    arrays = frozen_arrays(program, frozen, program.abstract.frozen)
    on_mesh = jax.jit(lambda values: values, out_shardings=replicated(program.mesh))
    hyperparameters = on_mesh(host_hyperparameters(program.config))
    return replace(program, hyperparameters=hyperparameters, frozen=arrays)


def check_remat(policy: str, device: jax.Device) -> None:
    """Raise `UserError` if a device lacks the pinned host memory that the policy `offload` needs."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if policy == "offload" and "pinned_host" not in kinds:
        raise UserError(
            f"train.remat offload needs pinned host memory, which {device.platform} devices lack: use --train.remat dots"
        )


def _check_parts(config: Config, model: GPT | None, ops: Ops | None) -> None:
    """Check that a given model and given operations support the settings."""
    if ops is not None and config.model.dropout and ops.attend is not attend:
        raise UserError(
            f"model.dropout {config.model.dropout:g} needs the attention of Ops(): pass ops._replace(attend=Ops().attend), or "
            f"set model.dropout to 0"
        )
    if config.train.scan_layers and isinstance(model, GPT) and not isinstance(model, ScannedGPT):
        raise UserError("train.scan_layers needs a ScannedGPT (jaxgpt.model.scan), not a GPT")


def replicated_note(opt_state: Any, mesh: Mesh) -> str:
    """Return a note if more than a tenth of the bytes of the optimizer state is replicated on every device, or "".

    Without sharding over fsdp or tensor, the result is "".
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return ""
    total = 0
    replicated_bytes = 0
    can_be_sharded = False
    sizes = [mesh.shape[axis] for axis in ("fsdp", "tensor") if mesh.shape[axis] > 1]
    for leaf in jax.tree.leaves(opt_state):
        size = leaf.size * leaf.dtype.itemsize
        total += size
        if leaf.sharding.is_fully_replicated:
            replicated_bytes += size
            can_be_sharded |= any(length % ways == 0 for length in leaf.shape for ways in sizes)
    if replicated_bytes <= 0.1 * total:
        return ""
    share = f"{replicated_bytes / total:.0%} of the optimizer state is replicated on every device"
    if not can_be_sharded:
        return f"{share}: neither fsdp nor tensor divides a dimension of these arrays"
    return f"{share}: to shard it, return its arrays from init in nn.Partitioned, with logical axes"
