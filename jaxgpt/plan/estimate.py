"""What a training step needs of a machine, from shapes and placements alone: no compiler, a second or two."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, cast, get_args, get_type_hints

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxgpt.config import Config, TrainConfig, UserError
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.mesh import AXES, microbatches, resolve
from jaxgpt.plan.figures import Figures, Traffic, summed
from jaxgpt.plan.hlo import Collective
from jaxgpt.plan.topology import Topology
from jaxgpt.train.step import loss_sum
from jaxgpt.trainer.metrics import flops_per_token
from jaxgpt.trainer.program import Program, make_loss_fn

ELEMENTWISE = frozenset(
    "abs add add_any and broadcast_in_dim concatenate convert_element_type copy cos div eq erf exp exp2 ge gt integer_pow le "
    "log logistic lt max min mul ne neg not or pow reshape rsqrt select_n sign sin slice split sqrt square squeeze "
    "stop_gradient sub tanh transpose".split()
)


def planned(config: Config, topology: Topology) -> tuple[Config, str]:
    """The config with its mesh in numbers, and what should be said about it.

    Raises:
        UserError: the mesh does not fit the machine, its slices, the batch or the model.
    """
    mesh, note = resolve(config, topology.n_devices, tpu=bool(topology.chip.host))
    if mesh.data % topology.slices:
        raise UserError(
            f"mesh.data {mesh.data} is not a multiple of --slices {topology.slices}, each of which holds a copy of the "
            f"weights: use --mesh.data {topology.slices} --mesh.fsdp -1"
        )
    return replace(config, mesh=mesh), note


def estimate(config: Config, topology: Topology) -> Figures:
    """From shapes and placements alone, in seconds: parameters and optimizer exactly, the rest roughly.

    Activations: what the backward pass keeps of the forward pass, by tracing both; a compiler keeps less where it
    recomputes something cheap, and more where it pads. Bytes to and from memory: the state, the gradients and the
    activations written and read once, and the weights read twice for every micro-batch. Collectives: those that
    the sharding table implies.

    Args:
        config: its mesh in numbers.
        topology: the machine.
    """
    program = Program(config, cast(Any, AbstractMesh(tuple(asdict(config.mesh).values()), AXES)))
    memory = state_bytes(program) | {
        "gradients": shard_bytes(program.abstract_state.params),
        "activations": _residual_bytes(program),
    }
    pieces = program.microbatches.accumulation
    state = sum(v for k, v in memory.items() if k not in ("activations", "gradients", "batch"))
    weights = memory["parameters"]
    moved = 2 * state + 2 * memory["gradients"] * pieces + pieces * (2 * memory["activations"] + 2 * weights)
    traffic = _implied_traffic(program, topology)
    return Figures(memory, topology.chip.hbm, step_flops(program), moved, traffic, useful=useful(program))


def suggestions(config: Config, topology: Topology) -> list[tuple[str, float]]:
    """Flags that need less memory, each with the bytes per device that it is estimated to need, the least first."""
    train, mesh = config.train, config.mesh
    tries: list[tuple[str, Config]] = []
    for remat in get_args(get_type_hints(TrainConfig)["remat"]):
        if remat not in (train.remat, "none"):
            tries.append((f"--train.remat {remat}", replace(config, train=replace(train, remat=remat))))
    ways = mesh.data * mesh.fsdp
    if half := microbatches(train, ways).rows // ways // 2:
        tries.append((f"--train.microbatch {half}", replace(config, train=replace(train, microbatch=half))))
    if mesh.data > topology.slices:
        wide = replace(mesh, data=topology.slices, fsdp=mesh.fsdp * mesh.data // topology.slices)
        tries.append((f"--mesh.data {wide.data} --mesh.fsdp {wide.fsdp}", replace(config, mesh=wide)))
    now, found = estimate(config, topology).total, []
    for flags, changed in tries:
        try:
            total = estimate(planned(changed, topology)[0], topology).total
        except UserError:
            continue
        if total < now:
            found.append((flags, total))
    return sorted(found, key=lambda each: each[1])


def state_bytes(program: Program) -> dict[str, float]:
    """Bytes of what goes into a step, by kind, on one device: counted."""
    state, config = program.abstract_state, program.config
    count, rows = program.microbatches
    average = {"average": shard_bytes(state.ema)} if state.ema is not None else {}
    return {
        "parameters": shard_bytes(state.params),
        "optimizer": shard_bytes(state.opt_state),
        **average,
        "batch": 4.0 * count * rows * (config.model.block_size + 1) / program.ways,
    }


def step_flops(program: Program) -> float:
    """FLOPs of a step on one device, padding included, by the formula for the model."""
    config = program.config
    tokens = math.prod(program.microbatches) * config.model.block_size
    return (
        flops_per_token(config.model, program.abstract_state.params) * tokens / math.prod(asdict(config.mesh).values())
    )


def useful(program: Program) -> float:
    """Share of a step's windows that are not padding."""
    return program.config.train.batch_size / math.prod(program.microbatches)


def shard_bytes(tree: Any) -> float:
    """Bytes of a tree of placed arrays, or of their shapes, on one device."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def _residual_bytes(program: Program) -> float:
    """What the backward pass keeps of a micro-batch, and the gradient of the largest of it, on one device."""
    config, model = program.config, program.config.model
    rows = program.microbatches.rows
    key = named_key(0, "dropout") if model.dropout > 0 else None
    loss_fn = make_loss_fn(program.model, config.train.loss_chunk)

    def kept(params: Any, windows: jax.Array) -> Any:
        return jax.vjp(lambda p: loss_sum(p, windows, key, loss_fn)[0], params)[1]

    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), program.abstract_state.params)
    windows = jax.ShapeDtypeStruct((rows, model.block_size + 1), jnp.int32)
    jaxpr = jax.make_jaxpr(kept)(params, windows).jaxpr
    ways, split = program.ways, {model.n_head, model.kv_heads, model.mlp_width, model.vocab_size}
    sizes = [0.0]
    for aval in _roots(jaxpr):
        shape = aval.shape
        if rows in shape[:2] or rows * model.block_size in shape[:2]:
            part = config.mesh.tensor if split & set(shape[1:]) else 1
            sizes.append(math.prod(shape) * aval.dtype.itemsize / ways / part)
    return sum(sizes) + max(sizes)


def _roots(jaxpr: Any) -> list[Any]:
    """Shapes and types of what has to be in memory for a function's results: those results themselves, or what they come
    from by nothing but elementwise steps, which a compiler does again where it needs them. Arguments are not counted."""
    made_by = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    waiting, seen, found = list(jaxpr.outvars), set(), []
    while waiting:
        var = waiting.pop()
        eqn = made_by.get(id(var))
        if eqn is None or id(var) in seen:
            continue
        seen.add(id(var))
        if _elementwise(eqn):
            waiting += [v for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)]
        elif hasattr(var.aval, "dtype"):
            found.append(var.aval)
    return found


def _elementwise(eqn: Any) -> bool:
    inner = next((v for v in eqn.params.values() if hasattr(v, "eqns")), None)
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call") and inner is not None:
        return all(_elementwise(each) for each in inner.eqns)
    return eqn.primitive.name in ELEMENTWISE


def _implied_traffic(program: Program, topology: Topology) -> dict[str, Traffic]:
    """What the table implies, in the compute dtype, for every micro-batch.

    Over fsdp: weights gathered twice, gradients scattered, and tokens' vectors brought from where they are looked up, and
    back; a table that is no head is not gathered. Over data: gradients added. Over tensor: four sums of a block's activations.
    """
    config, mesh = program.config, program.config.mesh
    width = jnp.dtype(config.train.compute_dtype).itemsize
    pieces, layers = program.microbatches.accumulation, config.model.n_layer
    params = program.abstract_state.params
    whole = sum(leaf.size for leaf in jax.tree.leaves(params)) * width / mesh.tensor
    table = 0 if config.model.tie_embeddings else params["wte"]["embedding"].size * width / mesh.tensor
    rows = program.microbatches.rows // program.ways
    block = rows * config.model.block_size * config.model.n_embd * width
    within = max(mesh.data // topology.slices, 1)
    collectives = (
        Collective("all-gather", whole - table, mesh.fsdp, 2 * pieces),
        Collective("reduce-scatter", (whole - table) / mesh.fsdp, mesh.fsdp, pieces),
        Collective("all-to-all", block, mesh.fsdp, 2 * pieces),
        Collective("all-reduce", whole / mesh.fsdp, within, pieces),
        # Between slices every device has its own part of what its slice has added up.
        Collective("all-reduce", whole / mesh.fsdp / within, topology.slices, pieces, True),
        Collective("all-reduce", block, mesh.tensor, 4 * layers * pieces),
    )
    return summed(one for one in collectives if one.group > 1)
