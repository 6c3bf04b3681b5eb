"""Compare a learner's function with the reference, and return the error and its likely cause."""

from __future__ import annotations

import html
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import short_repr
from jaxgpt.suggestions import did_you_mean
from jaxgpt_course.attention import ATTENTION, BLOCK, MASK, SOFTMAX
from jaxgpt_course.embeddings import EMBEDDING, ROPE
from jaxgpt_course.exercise import Exercise
from jaxgpt_course.generation import CACHE, GREEDY, SAMPLE, TOP_P
from jaxgpt_course.mesh import PRODUCT
from jaxgpt_course.training import ACCUMULATION, ADAM, LOSS, STEP
from jaxgpt_course.transformations import AUX, DEVICES, EXAMPLES, HVP, SCAN, SEEDS, VJP

_EXERCISES = (
    *(EMBEDDING, SOFTMAX, MASK, ATTENTION, BLOCK, LOSS, STEP, ADAM, ROPE, ACCUMULATION),
    *(VJP, AUX, SCAN, DEVICES, SEEDS, EXAMPLES, HVP),
    *(GREEDY, TOP_P, SAMPLE, CACHE, PRODUCT),
)
_RTOL, _ATOL = 1e-4, 1e-5  # tolerances above the rounding errors of float32 sums, about 1e-6
_KINDS = {"booleans": jnp.bool_, "integers": jnp.integer, "floats": jnp.floating}
_HERE = os.path.dirname(__file__)  # noqa: PTH120


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a check, which prints as one line. A result is truthy if the function is correct.

    Attributes:
        exercise: name of the exercise.
        passed: whether the function returned the right result for every input.
        message: the inputs with correct results, or the error and its most likely cause.
        error: exception that made the function fail, if any; `raise result.error` shows its traceback.
    """

    exercise: str
    passed: bool
    message: str
    error: Exception | None = None

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{self._title}: {self.message}"

    def _repr_html_(self) -> str:
        """Return HTML, because notebooks wrap lines of HTML, but not of plain text."""
        return f"<p><strong>{html.escape(self._title)}</strong>: {html.escape(self.message)}</p>"

    @property
    def _title(self) -> str:
        return f"{self.exercise}: {'correct' if self.passed else 'not yet'}"


@dataclass(frozen=True, repr=False)
class Score:
    """The results of all exercises, which print as a table.

    Attributes:
        results: a result per exercise, in the order of `exercises()`.
    """

    results: tuple[Result, ...]

    @property
    def correct(self) -> int:
        """Number of exercises that are solved."""
        return sum(result.passed for result in self.results)

    def __repr__(self) -> str:
        rows = [f"{'ok' if each.passed else '  '} {each.exercise:13}{each.message}" for each in self.results]
        return "\n".join([f"{self.correct} of {len(self.results)} correct", *rows])


class _Failed(NamedTuple):
    """The reason for a failed check, and the exception that caused it, if any."""

    why: str
    error: Exception | None = None


def exercises() -> tuple[Exercise, ...]:
    """Return all exercises; an exercise prints its signature and statement."""
    return _EXERCISES


def check(name: str, function: Callable[..., Any]) -> Result:
    """Compare a learner's function with the reference for ordinary and extreme inputs.

    The function may use NumPy or jax.numpy. It is called with NumPy arrays, and if it raises an error, once more with JAX
    arrays, so that both `x[0] = y` and `x.at[0].set(y)` work. Exercises with `Exercise.jit` also call it under `jax.jit`.

    `check` raises no error: it returns a failed result if the name is unknown, or `function` is not callable or fails.

    Args:
        name: name of the exercise, such as "attention"; `exercises()` lists all.
        function: function with the parameters of the exercise, in the same order; their names may differ.

    Returns:
        The result: `passed`, a one-line `message`, and the `error` that the function raised, if any.
    """
    by_name = {key: exercise for exercise in _EXERCISES for key in (exercise.name, *exercise.aliases)}
    exercise = by_name.get(name.lower()) if isinstance(name, str) else None
    if exercise is None:
        near = did_you_mean(name.lower(), by_name) if isinstance(name, str) else ""
        names = ", ".join(exercise.name for exercise in _EXERCISES)
        return Result(str(name), False, f"no exercise {short_repr(name)}{near}: one of {names}")
    if not callable(function):
        what = f"{exercise.reference.__name__}({', '.join(exercise.parameters)})"
        return Result(exercise.name, False, f"pass the function {what} itself, not {short_repr(function)}")
    with np.errstate(all="ignore"), warnings.catch_warnings(), jax.default_matmul_precision("highest"):
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's warning about the mean of an empty array
        failed = _arguments(exercise, function) or _compare(exercise, function)
    if failed:
        return Result(exercise.name, False, failed.why, failed.error)
    return Result(exercise.name, True, f"right for {', '.join(_expected(exercise))}")


def score(functions: Mapping[str, Any]) -> Score:
    """Check all exercises.

    Args:
        functions: functions by name (see `Exercise.signature`), such as `globals()`. A missing function counts as not solved.
    """

    def result(exercise: Exercise) -> Result:
        name = exercise.reference.__name__
        if name in functions:
            return check(exercise.name, functions[name])
        return Result(exercise.name, False, f"not solved yet: there is no function {name}")

    return Score(tuple(map(result, _EXERCISES)))


def _arguments(exercise: Exercise, function: Callable[..., Any]) -> _Failed | None:
    """Check that the function takes as many arguments as the exercise has."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    try:
        signature.bind(*exercise.parameters)
    except TypeError:
        wanted = f"({', '.join(exercise.parameters)})"
        return _Failed(f"the function takes {signature}, but is called with the arguments {wanted}")
    return None


@cache
def _inputs(exercise: Exercise) -> Mapping[str, tuple[Any, ...]]:
    return exercise.inputs()


@cache
def _expected(exercise: Exercise) -> dict[str, Any]:
    """Compute the results of the reference, keyed by the description of the input."""
    results = {label: exercise.call(exercise.reference, args) for label, args in _inputs(exercise).items()}
    return {label: jax.tree.map(np.asarray, result) for label, result in results.items()}


@cache
def _mistaken(exercise: Exercise, index: int) -> list[Any]:
    """Compute the results of a typical mistake."""
    expected = _expected(exercise)
    function = exercise.mistakes[index][1]
    return [_run(exercise, function, args, expected[label]) for label, args in _inputs(exercise).items()]


def _compare(exercise: Exercise, function: Callable[..., Any]) -> _Failed | None:
    """Compare the function with the reference on all inputs; return the most specific error, or None."""
    expected, inputs = _expected(exercise), _inputs(exercise)
    results = {label: _run(exercise, function, args, expected[label]) for label, args in inputs.items()}
    first = next(iter(inputs))
    again = _run(exercise, function, inputs[first], expected[first])
    if not isinstance(again, _Failed) and not isinstance(results[first], _Failed) and not _same(again, results[first]):
        return _Failed(
            "two calls with the same arguments return different results: the function keeps state or draws random numbers"
        )
    if all(_same(results[label], expected[label]) for label in inputs):
        return _compile(exercise, function)
    if all(_exchanged(exercise, results[label], expected[label]) for label in inputs):
        return _Failed(f"the two results are exchanged: return {', '.join(exercise.returns)}")
    for index, (why, _) in enumerate(exercise.mistakes):
        if all(map(_alike, results.values(), _mistaken(exercise, index), expected.values())):
            return _Failed(why)
    for label, result in results.items():
        failed = result if isinstance(result, _Failed) else _shapes(exercise, result, expected[label])
        if failed:
            return failed._replace(why=f"{failed.why} (input: {label})")
    for label, result in results.items():
        for law in () if _same(result, expected[label]) else exercise.laws:
            if broken := law(result, *inputs[label]):
                return _Failed(f"{broken} (input: {label})")
    label = next(label for label in inputs if not _same(results[label], expected[label]))
    return _Failed(f"{_values(exercise, results[label], expected[label])} (input: {label})")


def _run(exercise: Exercise, function: Callable[..., Any], args: tuple[Any, ...], expected: Any) -> Any:
    """Call a function with NumPy arrays or, if it raises an error, with JAX arrays.

    Returns the result in the expected structure, or `_Failed`.
    """
    failed = None
    for convert in (np.array, jnp.asarray):
        given = jax.tree.map(lambda x: convert(x) if isinstance(x, np.ndarray) else x, args)  # noqa: B023
        try:
            result = _arrays(exercise, exercise.call(function, given), expected)
        except Exception as error:  # any exception of the learner's function
            new = _Failed(_raised(function, error), error)
            # With NumPy arrays, a function for JAX arrays fails at `x.at`. Report its error with JAX arrays instead.
            if failed is None or ("numpy.ndarray" in str(failed.error) and type(error) is not type(failed.error)):
                failed = new
            continue
        for name, before, after in zip(exercise.parameters, args, given, strict=True):
            if not all(map(_unchanged, jax.tree.leaves(before), jax.tree.leaves(after))):
                return _Failed(
                    f"the function changes its argument {name}: make a new array instead, because a JAX array cannot be changed"
                )
        return result
    return failed


def _compile(exercise: Exercise, function: Callable[..., Any]) -> _Failed | None:
    """Compare a function with right results with the reference under `jax.jit`, if the exercise requires it."""
    if not exercise.jit:
        return None
    for label, args in _inputs(exercise).items():
        # Functions among the arguments are passed unchanged; everything else is traced.
        leaves, structure = jax.tree.flatten(args)
        traced = [leaf for leaf in leaves if not callable(leaf)]

        def on_traced(traced: list[Any], leaves: list[Any] = leaves, structure: Any = structure) -> Any:
            rest = iter(traced)
            filled = [leaf if callable(leaf) else next(rest) for leaf in leaves]
            return exercise.call(function, jax.tree.unflatten(structure, filled))

        try:
            result = _arrays(exercise, jax.jit(on_traced)(traced), _expected(exercise)[label])
        except Exception as error:  # any exception of the learner's function
            return _Failed(
                f"the results are right, but under jax.jit {_raised(function, error)}; {exercise.jit}", error
            )
        if not _same(result, _expected(exercise)[label]):
            return _Failed(f"the results are right, but under jax.jit they differ; {exercise.jit} (input: {label})")
    return None


def _unchanged(before: Any, after: Any) -> bool:
    return not isinstance(before, np.ndarray) or np.array_equal(before, np.asarray(after), equal_nan=True)


def _raised(function: Callable[..., Any], error: Exception) -> str:
    """Describe an exception in one line: type, line of the learner's code, beginning of the message."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_HERE)]
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    where = f" in line {lines[-1]}" if lines else ""
    first = [line for line in str(error).splitlines() if line.strip()][:3]
    text = " ".join(" ".join(first).split())
    return f"the function raises {type(error).__name__}{where}: {text[:300] or 'without a message'}"


def _arrays(exercise: Exercise, result: Any, expected: Any) -> Any:
    """Convert the leaves of a result to arrays, or return `_Failed` if the structure is wrong."""
    result = tuple(result) if isinstance(result, list) and isinstance(expected, tuple) else result
    structure: Any = jax.tree.structure(expected)
    names = ", ".join(exercise.returns)
    if isinstance(result, tuple) and len(result) == 2 and _fits(expected[::-1], result) and not _fits(expected, result):
        return _Failed(f"the two results are exchanged: return {names}")
    if result is None:
        return _Failed(f"the function returns None instead of {names}: is the return statement missing?")
    try:
        leaves = structure.flatten_up_to(result)
    except ValueError:
        shape = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a value of type {type(result).__name__}"
        inside = ""
        if isinstance(result, tuple) and len(result) == len(exercise.returns):
            shape, inside = "a different structure", ": parameters, states and caches keep their structure"
        return _Failed(f"the function returns {shape} instead of {names}{inside}")
    arrays = []
    for leaf in leaves:
        try:
            arrays.append(np.asarray(leaf))
        except ValueError:  # ragged lists
            arrays.append(np.array(None))
        if _kind(arrays[-1]) not in _KINDS:
            return _Failed(f"the function returns {short_repr(leaf)} in place of an array of numbers: expected {names}")
    return jax.tree.unflatten(structure, arrays)


def _fits(expected: Any, result: Any) -> bool:
    """Return whether a result has the given structure."""
    try:
        jax.tree.structure(expected).flatten_up_to(result)
    except ValueError:
        return False
    return True


def _exchanged(exercise: Exercise, result: Any, expected: Any) -> bool:
    """Return whether the two results of a function are swapped."""
    two = len(exercise.returns) == 2 and not isinstance(result, _Failed)
    return two and _fits(expected[::-1], result) and _same(result[::-1], expected)


def _kind(x: np.ndarray) -> str:
    return next((kind for kind, dtype in _KINDS.items() if jnp.issubdtype(x.dtype, dtype)), str(x.dtype))


def _same(result: Any, expected: Any) -> bool:
    """Return whether two results have equal shapes and kinds of numbers, and equal values up to rounding."""
    if isinstance(result, _Failed) or isinstance(expected, _Failed):
        return False
    return all(map(_close, jax.tree.leaves(result), jax.tree.leaves(expected)))


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    # An empty array matches any kind, because an empty list converts to floats.
    if a.shape != b.shape or (a.size and _kind(a) != _kind(b)):
        return False
    x, y = a.astype(np.float64), b.astype(np.float64)
    return np.allclose(x, y, rtol=_RTOL, atol=_ATOL, equal_nan=True)


def _alike(result: Any, mistaken: Any, expected: Any) -> bool:
    """Return whether a result matches a known mistake; inf matches NaN, as overflow can lead to either."""
    broken, both = _overflows(result, expected), _overflows(mistaken, expected)
    return (broken and both) if broken or both else _same(result, mistaken)


def _overflows(result: Any, expected: Any) -> bool:
    if isinstance(result, _Failed):
        return False
    leaves = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return any(
        _kind(x) == "floats" and x.shape == y.shape and bool(((np.isnan(x) | (x == np.inf)) & np.isfinite(y)).any())
        for x, y in leaves
    )


def _leaves(exercise: Exercise, tree: Any) -> list[tuple[str, np.ndarray]]:
    """Name the leaves of a result: "value", "grads['head']"."""
    named = dict(zip(exercise.returns, tree if len(exercise.returns) > 1 else (tree,), strict=True))
    return [
        (path[0].key + jax.tree_util.keystr(path[1:]), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(named)
    ]


def _shapes(exercise: Exercise, result: Any, expected: Any) -> _Failed | None:
    for (name, a), (_, b) in zip(_leaves(exercise, result), _leaves(exercise, expected), strict=True):
        if a.shape != b.shape:
            return _Failed(f"{name} has shape {list(a.shape)} instead of {list(b.shape)}")
        if a.size and _kind(a) != _kind(b):
            return _Failed(f"{name} holds {_kind(a)} instead of {_kind(b)}")
    return None


def _values(exercise: Exercise, result: Any, expected: Any) -> str:
    """Describe the largest difference in the first array that differs."""
    for (name, a), (_, b) in zip(_leaves(exercise, result), _leaves(exercise, expected), strict=True):
        if _close(a, b):
            continue
        x, y = np.atleast_1d(a.astype(np.float64)), np.atleast_1d(b.astype(np.float64))
        difference = np.where(x == y, 0, np.nan_to_num(np.abs(x - y), nan=np.inf))
        place = np.unravel_index(difference.argmax(), difference.shape)
        index = str([int(i) for i in place]) if a.ndim else ""
        return f"{name}{index} is {x[place]:.5g} instead of {y[place]:.5g}"
    raise AssertionError("some leaf differs")
