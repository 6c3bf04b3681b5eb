"""The part of a run that one device computes: the bytes saved for its backward pass, and its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.extend.core
from jax.sharding import AbstractMesh

from jaxgpt.config import Config, MeshConfig, ModelConfig
from jaxgpt.kernels import Target, best
from jaxgpt.kernels.expert_tiles import GPU_TILE, tiles_of
from jaxgpt.model import GPT
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import microbatches, row_shards
from jaxgpt.parallel.rules import AXES, rules_for
from jaxgpt.plan.flops import count_flops
from jaxgpt.plan.kernel import traceable
from jaxgpt.train.loss import FrozenParts, Objective
from jaxgpt.trainer.build import make_program
from jaxgpt.trainer.program import Program

ELEMENTWISE = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy cos div empty2 eq erf "
    "exp exp2 ge gt integer_pow iota le log logistic lt max min mul ne neg not one_minus_square or platform_index polynomial "
    "pow reshape rsqrt select_n sign sin slice split sqrt square squeeze stop_gradient sub tanh transpose".split()
)

VIEWS = frozenset("convert_element_type copy reshape squeeze stop_gradient transpose".split())


class Answers(NamedTuple):
    """The answers of a rollout, over all devices."""

    rows: int  # number of answers
    tokens: int  # maximum number of tokens of an answer
    steps: int  # optimizer steps of a rollout
    checked: int  # answers whose probabilities are computed as in training, to check the sampler


class Work(NamedTuple):
    """The objective and rows of a step; by default, the next token of windows.

    Plans are cached by the value of these fields, or by the identity of functions.

    Attributes:
        objective_of: function from the model to the objective; None: the next token.
        rows: function that returns a batch without rows, like `parallel.rows.row_spec`; None: windows.
        windows: number of windows in a row.
        frozen: whether the objective reads a frozen copy of the weights, or weights of `frozen_model`.
        frozen_model: architecture of the frozen weights, such as a teacher's, also the field `teacher` of the dataclass
            `objective_of`; None: the architecture of the model.
        answers: the answers that the model generates for a batch; None: none.
    """

    objective_of: Callable[[GPT], Objective] | None = None
    rows: Callable[[], Any] | None = None
    windows: int = 1
    frozen: bool = False
    frozen_model: ModelConfig | None = None
    answers: Answers | None = None

    def any_frozen(self, config: Config) -> Any:
        """Return the argument `frozen` of `make_program`; None: nothing is frozen, or only the base of adapters."""
        if not self.frozen:
            return None
        return FrozenParts(None, unread_weights) if config.lora.rank else unread_weights

    def on_one_device(self, config: Config) -> Work:
        """Return the work of one device, as `one_device` returns its settings."""
        if self.frozen_model is None:
            return self
        return self._with_frozen(model_of_one_device(self.frozen_model, config.mesh))

    def with_frozen_layers(self, layers: int) -> Work:
        """Return the work with a different number of layers of `frozen_model`, if there is one."""
        if self.frozen_model is None:
            return self
        return self._with_frozen(replace(self.frozen_model, n_layer=layers))

    def _with_frozen(self, model: ModelConfig) -> Work:
        """Return the work with a different architecture of the frozen weights."""
        objective_of: Any = self.objective_of
        return self._replace(frozen_model=model, objective_of=replace(objective_of, teacher=model))


def unread_weights(place: Any) -> None:
    """Stand in for a function that reads frozen weights: a program on absent devices needs only their shapes.

    If `frozen` is a function, `make_program` takes the shapes of the model's weights, and does not call the function.
    """


NEXT_TOKEN = Work()
TPU = Target("tpu")


def batch_of(program: Program, work: Work = NEXT_TOKEN) -> Any:
    """Return the shapes of a batch of a step."""
    return program.batch(spec=work.rows() if work.rows else None)


@cache
def abstract_program(config: Config, target: Target = TPU, work: Work = NEXT_TOKEN, layers: int = 0) -> Program:
    """Return the program on absent devices, which can be traced, but not compiled.

    Args:
        config: settings of the run, with a resolved mesh.
        target: kind of the devices. Their attention kernel is replaced by its shape (`plan.kernel`).
        work: objective and batches of a step.
        layers: number of layers; 0: the config's number.
    """
    if layers:
        config = config.with_model(n_layer=layers)
    mesh: Any = AbstractMesh(tuple(sizes_of(config.mesh).values()), AXES)
    ops = best(config, target)
    ops = ops._replace(attend=traceable(ops.attend))
    return make_program(
        config,
        mesh,
        ops=ops,
        objective_of=work.objective_of,
        frozen=work.any_frozen(config),
        frozen_model=work.frozen_model,
    )


@cache
def one_device(config: Config) -> Config:
    """Return the settings of one device: its share of rows, heads, hidden units and vocabulary, over whole windows.

    The model has its full width, because weights are gathered along fsdp. If `tensor` does not divide an axis, every
    device computes the complete axis. All experts are on the device. `mesh.context` is unchanged: `trace` divides by it.
    """
    model = model_of_one_device(config.model, config.mesh)
    sizes = sizes_of(config.mesh)
    ways = row_shards(sizes)
    rows = microbatches(config.train, ways).rows // ways
    train = replace(config.train, batch_size=rows, accumulation=1)
    mesh_of_one = MeshConfig(data=1, fsdp=1, context=config.mesh.context, tensor=1)
    return replace(config, model=model, train=train, mesh=mesh_of_one)


def model_of_one_device(model: ModelConfig, mesh: MeshConfig) -> ModelConfig:
    """Return the share of one device of the heads, hidden units and vocabulary of a model."""
    sizes = sizes_of(mesh)
    abstract_mesh: Any = AbstractMesh(tuple(sizes.values()), AXES)
    rules = rules_for(model, abstract_mesh)
    if not model.attn_proj:  # unsharded heads, added to the complete residual stream
        rules |= {"heads": (), "kv_heads": ()}

    def part(axis: str, size: int) -> int:
        return size // sizes["tensor"] if "tensor" in rules[axis] else size

    kv_heads = part("kv_heads", model.kv_heads)
    return replace(
        model,
        n_head=math.lcm(part("heads", model.n_head), kv_heads),  # a multiple of the key/value heads
        n_kv_head=kv_heads,
        head_dim=model.head_width,
        n_inner=part("mlp", model.mlp_width),
        vocab_size=part("vocab", model.vocab_size),
    )


class Trace(NamedTuple):
    """The costs of one microbatch on one device, found by tracing."""

    saved: float  # bytes of the arrays in device memory that the forward pass saves for the backward pass
    largest: float  # bytes of the largest of these arrays
    of_pairs: float  # bytes of the saved arrays with a row for each pair of token and expert
    flops: float  # FLOPs of matrix products and attention kernels, with recomputation


@cache
def trace(config: Config, target: Target, work: Work = NEXT_TOKEN, layers: int = 0, remat: bool = True) -> Trace:
    """Trace a microbatch of one device, forward and backward.

    Args:
        config: settings of a run, from `one_device`.
        target: kind of the device.
        work: objective and batches of a step.
        layers: number of layers; 0: the config's number.
        remat: whether to rematerialize as configured.
    """
    if not remat:
        config = replace(config, train=replace(config.train, remat="none"))
    program = abstract_program(config, target, work, layers)
    key = named_key(0, "dropout") if config.model.dropout > 0 else None

    def total(params: Any, frozen: Any, batch: Any) -> jax.Array:
        return program.objective(params, batch, key, frozen).minimized.sum()

    def residuals(params: Any, frozen: Any, batch: Any) -> Any:
        _, backward = jax.vjp(lambda params: total(params, frozen, batch), params)
        return backward

    # The backward function is a tree of arrays: the residuals.
    arguments = program.abstract_state.params, program.abstract_frozen, batch_of(program, work)
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments)
    forward = jax.make_jaxpr(residuals)(*plain).jaxpr
    arrays = _roots(forward, forward.outvars)
    sizes = [float(math.prod(aval.shape) * aval.dtype.itemsize) for aval in arrays]
    of_pairs = 0.0
    if config.model.n_experts:
        pairs = config.train.batch_size * work.windows * config.window * config.model.experts_per_token
        tiles = _tiles(target, pairs, config.model.n_experts)
        shapes = {(pairs,), tiles, (math.prod(tiles),)}
        of_pairs = sum(
            size
            for size, aval in zip(sizes, arrays, strict=True)
            if any(aval.shape[: len(shape)] == shape for shape in shapes)
        )
    step = jax.make_jaxpr(jax.grad(total))(*plain).jaxpr

    # The windows are whole; a device has its share of their positions.
    context = config.mesh.context
    return Trace(
        saved=sum(sizes) / context,
        largest=max(sizes, default=0.0) / context,
        of_pairs=of_pairs / context,
        flops=count_flops(step) / context,
    )


def pair_rows(target: Target, pairs: int, experts: int) -> int:
    """Return the number of rows that the kernel of experts stores for pairs of token and expert, including padding.

    Args:
        target: kind of the device.
        pairs: number of pairs.
        experts: number of experts on a device.
    """
    return math.prod(_tiles(target, pairs, experts))


def _tiles(target: Target, pairs: int, experts: int) -> tuple[int, ...]:
    """Return the axes of the rows: number of tiles and rows of a tile on GPUs, otherwise the number of pairs."""
    return tiles_of(pairs, experts, GPU_TILE) if target.platform == "gpu" else (pairs,)


def _roots(jaxpr: Any, results: Iterable[Any]) -> list[Any]:
    """Return the shapes and dtypes of the arrays to store for results of a jaxpr, except its arguments.

    Instead of a result of elementwise operations, their inputs are returned: compilers recompute such operations where they are
    needed. A factor of a matrix product, such as the output of an activation function, is returned even if it is elementwise:
    compilers store it for the product of the backward pass. The same holds for the arguments of a loop. Results in host memory
    are omitted.
    """
    made_by = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    factors = _factors(jaxpr, made_by)
    pending = list(results)
    seen = set[int]()
    found = []
    while pending:
        var = _source(pending.pop(), made_by)
        eqn = made_by.get(id(var))
        on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        if eqn is None or id(var) in seen or on_host:
            continue
        seen.add(id(var))
        if id(var) not in factors and _elementwise(eqn, eqn.outvars.index(var)):
            pending += [each for each in eqn.invars if not isinstance(each, jax.extend.core.Literal)]
        elif hasattr(var.aval, "dtype"):
            found.append(var.aval)
    return found


def _factors(jaxpr: Any, made_by: dict[int, Any]) -> set[int]:
    """Return the ids of the variables that are the left factors of matrix products, or arguments of loops.

    The left factor is assumed to depend on the batch, as in `x @ kernel`: it is the result of operations on activations.
    """
    found = set[int]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            left, *_ = eqn.invars
            found.add(id(_source(left, made_by)))
        if _is_loop(eqn):
            found |= {id(_source(var, made_by)) for var in eqn.invars}
    return found


def _is_loop(eqn: Any) -> bool:
    """Return whether an equation is a loop, or a function with a loop and its own derivative."""
    if eqn.primitive.name == "custom_vjp_call":
        return any(_is_loop(each) for each in eqn.params["call_jaxpr"].eqns)
    return eqn.primitive.name in ("scan", "while")


def _source(var: Any, made_by: dict[int, Any]) -> Any:
    """Follow a variable through views and conversions, back to the variable that they read."""
    while id(var) in made_by and made_by[id(var)].primitive.name in VIEWS:
        var = made_by[id(var)].invars[0]
    return var


def _elementwise(eqn: Any, result: int) -> bool:
    """Return whether a result of an equation is computed elementwise.

    In a call, all equations that lead to the result must be elementwise.
    """
    if eqn.primitive.name in ELEMENTWISE:
        return True
    body = _body(eqn)
    return body is not None and not _roots(body, [body.outvars[result]])


def _body(eqn: Any) -> Any:
    """Return the jaxpr that an equation calls; None: no call, or an unknown kind of call."""
    platforms = eqn.params.get("branches_platforms")
    if platforms:  # the accelerator branch of `jax.lax.platform_dependent`
        for names, branch in zip(platforms, eqn.params["branches"], strict=True):
            if "cpu" not in (names or ()):
                return branch.jaxpr
        return None
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call"):
        return next((value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")), None)
    return None
