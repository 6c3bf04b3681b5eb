"""Build the program of a config: the mesh, then shapes and functions, then the arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxgpt.checkpoint.placement import Place
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
from jaxgpt.trainer.given import ProgramParts
from jaxgpt.trainer.jitted import jit_functions
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.run_step import RunStep, host_hyperparameters
from jaxgpt.trainer.states import abstract, fresh, replicated_note
from jaxgpt.trainer.step_batches import StepBatches


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
        objective: objective to use instead of the default, `next_token_loss` with the penalties of `router_penalties`;
            with `lora.rank`, it receives the merged weights as `params`, and `FrozenParts.of_objective` as `frozen`.
        objective_of: function from the model, with the operations of the mesh, to the objective; not with `objective`.
        ops: operations to use instead of `jaxgpt.kernels.best(config, mesh)`.

    Raises:
        UserError: if a rule is invalid (see `change_rules`); if a rule, the mesh or a setting does not fit the devices, the
            batch or the model; if `post.objective` needs an objective that is not given; or if both `objective` and
            `objective_of` are given.
    """
    if config.post.objective != "next-token" and objective is None and objective_of is None:
        raise UserError(
            f"post.objective {config.post.objective} needs its objective: pass build=jaxgpt.post.start.build_program, or an "
            f"objective"
        )

    parts = ProgramParts(
        optimizer=optimizer,
        frozen=frozen,
        frozen_model=frozen_model,
        model=model,
        objective=objective,
        objective_of=objective_of,
        ops=ops,
    )

    # Make the mesh, and reject settings that do not fit the mesh.
    set_quick_flag()  # before JAX's first use of a device
    sizes, mesh_note = resolve(config, jax.device_count(), process_count(), jax.default_backend() == "tpu")
    mesh = make_mesh(sizes)
    device = mesh.devices.flat[0]
    check_remat(config.train.remat, device)
    _check_parts(config, parts)

    # Make the shapes and functions.
    program = make_program(config, mesh, parts, change_rules(rules or {}))

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
    parts: ProgramParts = ProgramParts(),  # noqa: B008  # immutable
    rules: Rules = RULES,
) -> Program:
    """Make the program of a config on a mesh of the available devices, or of planned hardware. `build` adds the arrays.

    Args:
        config: settings of the run.
        mesh: a `Mesh` or, for estimates, an `AbstractMesh`.
        parts: parts given in Python; `frozen` may be abstract.
        rules: the complete sharding table.
    """
    # Compute the shapes.
    make = jax.jit(partial(fresh, config=config, model=parts.model, optimizer=parts.optimizer))
    shapes = jax.eval_shape(make, 0)
    frozen = frozen_shapes(config, shapes, parts.frozen, parts.frozen_model)

    # Make the functions.
    model = parts.model
    if model is None:
        cls = ScannedGPT if config.train.scan_layers else GPT
        ops = parts.ops or best(config, mesh)
        model = cls(config.model, ops, POLICIES[config.train.remat])
    batches = StepBatches(config, mesh)
    step = RunStep(
        config=config,
        mesh=mesh,
        model=model,
        objective=_objective(config, parts, model),
        optimizer=parts.optimizer,
        abstract=abstract(config, mesh, rules, shapes, frozen),
        accumulation=batches.microbatches.accumulation,
    )

    # Weights of a subclass of GPT are read only if such a model is given: the forward pass of GPT may differ.
    given = parts.names(config)
    readable = GPT if "model" in given else None
    return Program(
        config=config,
        mesh=mesh,
        place=Place(mesh, rules, readable),
        model=model,
        abstract=step.abstract,
        fresh=make,
        batches=batches,
        pure_step=step,
        jitted=jit_functions(step),
        hyperparameters=host_hyperparameters(config),
        given=given,
    )


def _objective(config: Config, parts: ProgramParts, model: GPT) -> Objective:
    """Return the objective of the parts, or of the next token; with `lora.rank`, as a function of the adapters."""
    if parts.objective_of is not None:
        objective = parts.objective_of(model)
    elif parts.objective is not None:
        objective = parts.objective
    else:
        objective = _next_token_objective(config, model, may_reorder=parts.model is None)
    return with_adapters(objective, config.lora.alpha) if config.lora.rank else objective


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


def _check_parts(config: Config, parts: ProgramParts) -> None:
    """Raise `UserError` if parts do not support the settings, or contradict each other."""
    if parts.objective is not None and parts.objective_of is not None:
        raise UserError("the program has two objectives: pass objective or objective_of, not both")
    ops = parts.ops
    if ops is not None and config.model.dropout and ops.attend is not attend:
        raise UserError(
            f"model.dropout {config.model.dropout:g} needs the attention of Ops(): pass ops._replace(attend=Ops().attend), or "
            f"set model.dropout to 0"
        )
    model = parts.model
    if config.train.scan_layers and isinstance(model, GPT) and not isinstance(model, ScannedGPT):
        raise UserError("train.scan_layers needs a ScannedGPT (jaxgpt.model.scan), not a GPT")
