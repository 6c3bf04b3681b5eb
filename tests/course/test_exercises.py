"""Exercises: right answers pass, and the result of a wrong answer explains the mistake."""

from __future__ import annotations

import re
import runpy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import repository
from jaxgpt_course import Exercise, check, exercises, score

COURSE = repository() / "docs" / "course"
each = pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)


@each
def test_the_reference_passes(exercise: Exercise) -> None:
    result = check(exercise.name, exercise.reference)
    assert result.passed
    assert result
    assert repr(result).startswith(f"{exercise.name}: correct: right for ")


@each
def test_each_typical_mistake_is_recognized(exercise: Exercise) -> None:
    assert len(exercise.mistakes) >= 2
    for why, function in exercise.mistakes:
        result = check(exercise.name, function)
        assert not result
        assert result.message == why
        assert "\n" not in repr(result)


@each
def test_an_exercise_is_stated_in_the_course(exercise: Exercise) -> None:
    """The page of each exercise links to it, and the page of exercises has its signature."""
    assert f"(exercises.md#{exercise.name})" in (COURSE / f"{exercise.page}.md").read_text()
    section = (COURSE / "exercises.md").read_text().split(f"\n## {exercise.name.capitalize()}\n")[1].split("\n## ")[0]
    for name in (exercise.reference.__name__, f"{exercise.reference.__name__}_solution"):
        assert section.count(f"def {name}({', '.join(exercise.parameters)}):") == 1
        assert section.count(f'course.check("{exercise.name}", {name})') == 1
    assert exercise.signature.startswith(f"{exercise.reference.__name__}({exercise.parameters[0]}")
    assert exercise.statement in repr(exercise)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cells of the page; `softmax` is solved, the other functions are empty."""
    cells = re.findall(
        r"^```\{code-cell\} python\n(?::tags: [^\n]*\n)?(.*?)^```", (COURSE / "exercises.md").read_text(), re.M | re.S
    )
    empty = "def softmax(scores_TS):\n    ...\n"
    assert sum(empty in cell for cell in cells) == 1
    script = tmp_path_factory.mktemp("page") / "page.py"
    script.write_text(
        "\n".join(cells).replace(empty, "def softmax(scores_TS):\n    return jax.nn.softmax(scores_TS)\n")
    )
    return runpy.run_path(str(script))


@each
def test_the_solution_of_the_page_passes(page: dict[str, Any], exercise: Exercise) -> None:
    """Solutions are independent of the references: they use only NumPy and jax.numpy."""
    assert check(exercise.name, page[f"{exercise.reference.__name__}_solution"])


def test_the_score_of_the_page_counts_the_functions_of_the_learner_only(page: dict[str, Any]) -> None:
    """Running all cells also defines the solutions, which do not count."""
    assert [result.exercise for result in page["result"].results if result] == ["softmax"]


def softmax(scores, axis=-1):
    exp = jnp.exp(scores - scores.max(axis, keepdims=True))
    return exp / exp.sum(axis, keepdims=True)


def attend(mask):
    return lambda q, k, v: softmax(mask(q @ k.T / len(q[0]) ** 0.5)) @ v


def visible(x, k=0):
    return np.tri(len(x), k=k, dtype=bool)


def step_without_its_loss(state, batch, loss, optimizer):
    params, opt_state = state
    updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def sampled(model, ids, n):
    return np.random.default_rng().integers(0, 9, n)


def extend_elsewhere(q, k, v, cache, length):
    k_SH, v_SH = cache[0].at[0].set(k), cache[1].at[0].set(v)
    return softmax(k_SH @ q / len(q) ** 0.5) @ v_SH, (k_SH, v_SH)


def extend_with_a_finite_mask(q, k, v, cache, length):
    k_SH, v_SH = cache[0].at[length].set(k), cache[1].at[length].set(v)
    scores = jnp.where(np.arange(len(k_SH)) <= length, k_SH @ q / len(q) ** 0.5, -30)
    return softmax(scores) @ v_SH, (k_SH, v_SH)


def extend_in_place(q, k, v, cache, length):
    cache[0][length], cache[1][length] = k, v
    weights = softmax(cache[0][: length + 1] @ q / len(q) ** 0.5)
    return weights @ cache[1][: length + 1], cache


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("softmax", lambda x: softmax(2 * x, 0), "the rows do not sum to 1"),
        ("softmax", lambda x: x / jnp.abs(x).sum(-1, keepdims=True), "negative: the exponential is missing"),
        ("softmax", lambda x: softmax(2 * x), r"weights_TS\[\d, \d\] is .* instead of"),
        ("mask", lambda T: np.tri(T, k=1, dtype=bool), "query 0 sees key 1"),
        ("mask", lambda T: np.tri(T, k=-2, dtype=bool), "a position does not see itself"),
        ("attention", attend(lambda x: jnp.where(visible(x, 1), x, -jnp.inf)), "query 0 gives key 1 the weight"),
        ("attention", attend(lambda x: x + (1 - visible(x)) * -np.inf), "some results are NaN"),
        ("attention", attend(lambda x: jnp.where(visible(x), x, -20)), "not zero: set masked scores to -inf"),
        ("attention", lambda q, k, v: v / 2, "the weights of a query do not sum to 1"),
        ("block", lambda x, attend, mlp: x, r"out_TD\[\d, \d\] is"),
        ("loss", lambda logits, targets: -logits[np.arange(len(targets)), targets].mean(), "the loss is negative"),
        ("step", step_without_its_loss, "a different structure"),
        ("greedy", sampled, "two calls with the same arguments return different results"),
        ("greedy", lambda model, ids, n: np.zeros(n), "new_ids holds floats instead of integers"),
        ("top-p", lambda logits, p: jnp.full_like(logits, -jnp.inf), "every token is removed"),
        ("top-p", lambda logits, p: logits - 1, "the logits of tokens that are kept change"),
        ("cache", extend_elsewhere, r"k_SH changes in slot 0: only slot 3 \(length\) may change"),
        ("cache", extend_with_a_finite_mask, "the function attends to unused slots: set masked scores to -inf"),
        ("cache", extend_in_place, "the function changes its argument cache"),
    ],
)
def test_other_wrong_answers_are_told_a_law_or_a_value(name: str, function: Any, words: str) -> None:
    result = check(name, function)
    assert not result.passed
    assert re.search(words, result.message), result.message


def adam_with(b2=0.99, root=lambda v: jnp.sqrt(v) + 1e-8, t0=0, new=lambda w, update: w - update):
    def adam(w, g, m, v, t, rate):
        m, v = 0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g * g
        return new(w, rate * m / (1 - 0.9 ** (t + t0)) / root(v / (1 - b2 ** (t + t0)))), m, v

    return adam


def rope_with(join, theta=0.0):
    def rope(x, base):
        T, H = x.shape
        angle = np.arange(T)[:, None] / (theta or base) ** (2 * np.arange(H // 2) / H)
        z = (x[:, : H // 2] + 1j * x[:, H // 2 :]) * np.exp(1j * angle)
        return join([z.real, z.imag], x)

    return rope


def sample_without_probabilities(logits, temperature, p, u):
    kept = next(exercise for exercise in exercises() if exercise.name == "top-p").reference(logits / temperature, p)
    return jnp.argmax(jnp.cumsum(jnp.exp(kept)) > u)


def product_of_summed_units(x, up, down, bias):
    hidden = np.maximum(sum(x @ each for each in up), 0)
    return np.stack([sum(hidden @ each for each in down) + bias] * len(up))


def block_over_the_array(x, attend, mlp):
    def norm(x):
        return (x - x.mean()) / jnp.sqrt(x.var() + 1e-5)

    y = x + attend(norm(x))
    return y + mlp(norm(y))


def block_with_the_wrong_residual(x, attend, mlp):
    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    h = x + attend(norm(x))
    return x + mlp(norm(h))


def step_with_raw_gradients(state, batch, loss, optimizer):
    """Subtract the gradients themselves, and return the old state of the optimizer."""
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    return (jax.tree.map(jnp.subtract, params, grads), opt_state), value


def total(tree):
    return sum(leaf.sum() for leaf in jax.tree.leaves(tree))


def accuracy_of_the_gradient(logits_of, params, x, y):
    def f(params):
        logits = logits_of(params, x)
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()
        return (logits.argmax(1) == y).mean(), loss

    (accuracy, loss), grads = jax.value_and_grad(f, has_aux=True)(params)
    return loss, accuracy, grads


def fold_backwards(step, state, batches):
    return jax.lax.scan(step, state, jax.tree.map(lambda x: x[::-1], batches))


def mean_of_devices(params, part, loss_sum):
    (value, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
    return jax.lax.pmean(value / count, "data"), jax.tree.map(lambda g: jax.lax.pmean(g / count, "data"), grads)


def seeds_in_a_row(init, step, seeds, batch):
    def body(params, seed):
        new, loss = step(params, batch)
        return new, (new, loss)

    return jax.lax.scan(body, init(seeds[0]), seeds)[1]


def norm_of_the_batch(loss_of_one, params, x, y):
    def mean(params):
        return jax.vmap(loss_of_one, (None, 0, 0))(params, x, y).mean()

    return jnp.sqrt(total(jax.tree.map(jnp.square, jax.grad(mean)(params))))


def extend_with_slices(q, k, v, cache, length):
    k_SH, v_SH = (jnp.asarray(x).at[length].set(y) for x, y in zip(cache, (k, v), strict=True))
    return softmax(k_SH[: length + 1] @ q / len(q) ** 0.5) @ v_SH[: length + 1], (k_SH, v_SH)


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("cache", extend_with_slices, "so shapes must not depend on it: use all S slots, mask the scores"),
        (
            "seeds",
            lambda init, step, seeds, batch: step_of_each(init, step, np.asarray(seeds), batch),
            "map init over them",
        ),
        ("hvp", lambda f, w, v: jax.jvp(jax.grad(f), (w,), (v,))[1], "correct: right for"),
    ],
)
def test_a_function_that_must_compile_is_called_under_jit(name: str, function: Any, words: str) -> None:
    """Correct results alone do not suffice: the message has the place of the failure, and explains how to compile."""
    result = check(name, function)
    assert re.search(words, repr(result)), repr(result)
    assert result or result.message.startswith("the results are right, but under jax.jit the function raises ")


def step_of_each(init, step, seeds, batch):
    results = [step(init(int(seed)), batch) for seed in seeds]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def test_a_function_of_devices_is_called_with_their_axis() -> None:
    """A collective over an axis with a wrong name is an error that contains the name."""
    message = check("devices", lambda params, part, loss_sum: jax.lax.psum(part, "model")).message
    assert "model" in message
    assert "unbound axis name" in message


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("adam", adam_with(root=lambda v: jnp.sqrt(v + 1e-8)), "1e-8 is inside the root"),
        ("adam", adam_with(b2=0.999), "v uses 0.999"),
        ("adam", adam_with(t0=1), r"not 0.9\^\(t \+ 1\)"),
        ("adam", adam_with(t0=-1), r"not 0.9\^\(t - 1\)"),
        ("adam", adam_with(new=lambda w, update: -update), "the change of w is returned"),
        ("rope", rope_with(lambda y, x: np.stack(y, -1).reshape(x.shape)), "are interleaved: concatenate them"),
        ("rope", rope_with(lambda y, x: np.concatenate(y, 1), theta=10_000.0), "theta is ignored"),
        ("sample", sample_without_probabilities, "the exponentials are not divided by their sum"),
        ("product", product_of_summed_units, "hidden units of different devices are added"),
        ("block", block_over_the_array, "the norm runs over the whole array"),
        ("block", block_with_the_wrong_residual, "the output of the MLP is added to x"),
        ("step", step_with_raw_gradients, "gradients are subtracted from the parameters"),
        ("vjp", lambda x, u: softmax(x) * u, "the sum over i is missing"),
        ("vjp", lambda x, u: jax.vjp(jax.nn.log_softmax, x)[1](u)[0], "this is the vjp of log softmax"),
        ("aux", accuracy_of_the_gradient, "the gradient is 0: argmax has no derivative"),
        ("scan", lambda step, state, batches: jax.vmap(step, (None, 0))(state, batches), r"shape \[4, 3, 5\] instead"),
        ("scan", fold_backwards, "the batches are used in reverse order"),
        ("devices", mean_of_devices, "are a mean of the devices' means"),
        ("seeds", seeds_in_a_row, "each model continues from the model before it"),
        ("examples", norm_of_the_batch, "this is the norm of the mean gradient"),
        ("hvp", lambda f, w, v: jax.grad(lambda w: total(jax.grad(f)(w)))(w), "v is ignored"),
        (
            "hvp",
            lambda f, w, v: jax.tree.map(jnp.multiply, jax.grad(f)(w), v),
            "the gradient times v, element by element",
        ),
    ],
)
def test_a_typical_mistake_in_other_words_is_recognized(name: str, function: Any, words: str) -> None:
    """The answers are independent of the functions of the checker."""
    assert re.search(words, check(name, function).message), check(name, function).message


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("atention", softmax, "no exercise 'atention' (did you mean attention?)"),
        ("softmax", np.ones(3), "pass the function softmax(scores_TS) itself, not array("),
        ("head", lambda q, k: q, "takes (q, k), but is called with the arguments (q_TH, k_TH, v_TH)"),
        ("softmax", lambda x: None, "the function returns None instead of weights_TS: is the return statement"),
        ("softmax", lambda x: x.sum(-1), "shape [4] instead of [4, 6] (input: random"),
        ("softmax", lambda x: [[1, 2], [3]], "the function returns [[1, 2], [3]] in place of an array"),
        ("step", lambda s, b, loss, o: 3, "the function returns a value of type int instead of state, value"),
        ("cache", lambda q, k, v, c, n: (q, k, v), "the function returns a tuple of 3 instead of out_H, cache"),
    ],
)
def test_wrong_input_is_one_line(name: str, function: Any, words: str) -> None:
    assert words in check(name, function).message
    assert check("<b>", softmax)._repr_html_().startswith("<p><strong>&lt;b&gt;: not yet</strong>: no exercise")


@pytest.mark.parametrize("name", ["embedding", "step", "accumulation", "cache"])
def test_exchanged_results_are_named(name: str) -> None:
    """The two results have different structures, or only different values."""
    exercise = next(exercise for exercise in exercises() if exercise.name == name)

    def exchanged(*args: Any) -> Any:
        return tuple(exercise.reference(*args))[::-1]

    message = check(name, exchanged).message
    assert message.startswith(f"the two results are exchanged: return {', '.join(exercise.returns)}")


def test_the_score_counts_what_is_solved() -> None:
    solved = {exercise.reference.__name__: exercise.reference for exercise in exercises()}
    assert score(solved).correct == len(exercises())
    some = score({"softmax": softmax, "rope": lambda x, theta: x})
    assert some.correct == 1
    first, *lines = repr(some).splitlines()
    assert (first, len(lines)) == (f"1 of {len(exercises())} correct", len(exercises()))
    assert [line.split()[1] for line in lines if line.startswith("ok ")] == ["softmax"]
    assert lines[0].endswith("not solved yet: there is no function embed")


def fails(scores_TS: Any) -> Any:
    rows = scores_TS.shape[0]
    return scores_TS @ np.ones(rows)


def test_an_error_is_one_line_with_its_place() -> None:
    result = check("softmax", fails)
    line = fails.__code__.co_firstlineno + 2
    assert re.fullmatch(
        rf"the function raises \w+ in line {line}: .*", result.message.removesuffix(" (input: random scores)")
    )
    with pytest.raises((TypeError, ValueError)):
        raise result.error or AssertionError


def in_place(x):
    weights = np.zeros(x.shape)
    for row in range(len(x)):
        weights[row] = np.exp(x[row] - x[row].max())
        weights[row] /= weights[row].sum()
    return weights


def functional(x):
    exp = jnp.zeros(x.shape).at[:].set(jnp.exp(x - x.max(-1, keepdims=True)))
    return x.at[:].set(exp / exp.sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "function",
    [
        in_place,
        functional,
        jax.jit(softmax),
        partial(softmax, axis=-1),
        lambda x: in_place(x).tolist(),
        lambda x: np.exp(x - np.asarray(jax.nn.logsumexp(x, -1, keepdims=True))),
    ],
)
def test_answers_may_use_numpy_or_jax(function: Any) -> None:
    assert check("softmax", function)


def test_a_mistake_in_an_answer_for_jax_arrays_is_reported_as_such() -> None:
    assert "unexpected keyword argument 'axes'" in check("softmax", lambda x: x.at[:].set(0) + x.max(axes=0)).message
    assert "'numpy.ndarray' object has no attribute 'append'" in check("softmax", lambda x: x.append(0)).message
