"""All laws hold for correct code, and each planted bug fails the rows that it should and no others."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import run_folder
from helpers import MODELS, jaxgpt, make, small

from jaxgpt import kernels
from jaxgpt.config import Config, DataConfig
from jaxgpt.convert import models
from jaxgpt.data.tokenizer_files import make_tokenizer
from jaxgpt.decoding import sampler
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, engine
from jaxgpt.model import attention, embedding, gpt
from jaxgpt.ops import norms
from jaxgpt.ops.attention import Positions, Visible
from jaxgpt.study.verify import LAWS, Law, forward, fresh, training, verify
from jaxgpt.study.verify.subject import Skipped, distance
from jaxgpt.train import step

OURS = LAWS[:-1]  # without transformers, which is slow to import
Patch = pytest.MonkeyPatch


def tiny(name: str = "gpt2", **changes: object) -> LM:
    """A model whose context is longer than the windows of `verify`."""
    config = small(name, n_layer=1, **({"block_size": 30} | changes))
    return LM(
        Config(model=config, data=DataConfig(dataset="none", documents="mask")),
        make(config)[1],
        make_tokenizer("ids", "", 0, 17),
    )


def rows(lm: LM, laws: tuple[Law, ...] = OURS) -> dict[str, object]:
    with jax.numpy_dtype_promotion("standard"):  # optax
        return {row.name: row for row in verify(lm, laws)}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_law_holds_or_is_skipped(name: str) -> None:
    found = rows(tiny(name), LAWS)
    assert all(row.ok is not False for row in found.values()), found
    tied = found["tied head = token table"].ok
    assert tied is (True if MODELS[name].tie_embeddings else None)


@pytest.mark.long
def test_transformers_agrees() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    [row] = rows(tiny(), LAWS[-1:]).values()
    assert row.ok is True, row


def mask_sees_the_next_token(patch: Patch) -> None:
    right = Visible.mask

    def mask(self: Visible) -> jax.Array:
        later = self.query._replace(position_BT=self.query.position_BT + 1)
        return right(replace(self, query=later, key=self.key or self.query))

    patch.setattr(Visible, "mask", mask)


def cache_written_one_slot_late(patch: Patch) -> None:
    right = attention.write
    patch.setattr(attention, "write", lambda new, cached, slot: right(new, cached, slot + 1))


def head_apart_from_the_table(patch: Patch) -> None:
    def attend(self: embedding.Embedding, x_BTD: jax.Array) -> jax.Array:
        return x_BTD @ jax.lax.stop_gradient(self.embedding).T

    patch.setattr(embedding.Embedding, "attend", attend)


def rows_begin_one_slot_early(patch: Patch) -> None:
    right = engine.left_pad

    def left_pad(*args: object) -> tuple[np.ndarray, np.ndarray]:
        ids_BP, start_B = right(*args)
        return ids_BP, np.maximum(start_B - 1, 0)

    patch.setattr(engine, "left_pad", left_pad)


def pieces_not_divided(patch: Patch) -> None:
    right = step.gradients

    def gradients(*args: object, accumulation: int, **how: object) -> object:
        loss, grads = right(*args, accumulation=accumulation, **how)
        return loss, jax.tree.map(lambda g: g * accumulation, grads)

    patch.setattr(step, "gradients", gradients)


def mean_of_the_pieces_means(patch: Patch) -> None:
    right = step.gradients

    def gradients(params: object, windows: jax.Array, key: object, accumulation: int, **how: object) -> object:
        pieces = [right(params, piece, key, accumulation=1, **how) for piece in jnp.split(windows, accumulation)]
        return jax.tree.map(lambda *parts: sum(parts) / accumulation, *pieces)

    patch.setattr(step, "gradients", gradients)


def gradient_summed_over_devices(patch: Patch) -> None:
    right = step.gradients

    def gradients(*args: object, **how: object) -> object:
        loss, grads = right(*args, **how)
        mesh = jax.sharding.get_abstract_mesh()
        return loss, jax.tree.map(lambda g: g * (1 if mesh.empty else mesh.size), grads)

    patch.setattr(step, "gradients", gradients)


def positions_run_through_documents(patch: Patch) -> None:
    whole = lambda ids: Positions(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), ids)  # noqa: E731
    patch.setattr(forward, "document_positions", whole)


def fast_products_round(patch: Patch) -> None:
    right = kernels.CPU.linear
    wrong = lambda x, w, b, dtype: right(x, w, b, dtype) * 1.001  # noqa: E731
    patch.setattr(kernels, "CPU", kernels.CPU._replace(linear=wrong))


def layers_stacked_wrongly(patch: Patch) -> None:
    right = training.stack_layers
    patch.setattr(training, "stack_layers", lambda tree: jax.tree.map(lambda leaf: leaf * 1.001, right(tree)))


def recomputed_with_another_epsilon(patch: Patch) -> None:
    def remat(block: type, **_: object) -> Callable[..., object]:
        return lambda config, *rest: block(replace(config, norm_eps=0.1), *rest)

    patch.setattr(gpt.nn, "remat", remat)


def compiled_to_something_else(patch: Patch) -> None:
    right = norms.layer_norm
    patch.setitem(
        norms.NORMS, "layernorm", lambda x, eps, edit: right(x, eps) * (1.001 if jax.config.jax_disable_jit else 1.0)
    )


def loop_draws_with_another_number(patch: Patch) -> None:
    right = sampler.sample_token
    patch.setattr(
        sampler,
        "sample_token",
        lambda logits, text, keys, made, sampling: right(logits, text, keys, made + 1, sampling),
    )


def resume_loses_the_moments(patch: Patch) -> None:
    right = training.store.restore

    def restore(*args: object) -> object:
        state = right(*args)
        return state._replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))

    patch.setattr(training.store, "restore", restore)


def checkpoint_rounds(patch: Patch) -> None:
    module = sys.modules["jaxgpt.lm.model"]
    right = module.save_params
    patch.setattr(module, "save_params", lambda path, params, *rest: right(path, jax.tree.map(rounds, params), *rest))


def export_rounds(patch: Patch) -> None:
    right = models.save_weights

    def save_weights(path: object, params: dict, *rest: object) -> None:
        right(path, params | {"wpe": jax.tree.map(rounds, params["wpe"])}, *rest)

    patch.setattr(models, "save_weights", save_weights)


def export_swaps_queries_and_values(patch: Patch) -> None:
    right = models.save_weights

    def save_weights(path: object, params: dict, *rest: object) -> None:
        attn = params["h_0"]["attn"]
        attn = attn | {"q_proj": attn["v_proj"], "v_proj": attn["q_proj"]}
        right(path, params | {"h_0": params["h_0"] | {"attn": attn}}, *rest)

    patch.setattr(models, "save_weights", save_weights)


def rounds(leaf: jax.Array) -> jax.Array:
    """Change the last bit of every number."""
    return jnp.nextafter(leaf, jnp.float32(0))


def named(*names: str) -> tuple[Law, ...]:
    return tuple(law for law in LAWS if law.name in names)


FORWARD = LAWS[:5]
PIECES = named("4 microbatches = 1 batch", "8 devices = 1 device")
FILES = named("checkpoint read = written", "export read = written")

# A planted bug, the rows that must fail, and the laws computed without --long (none: only with it).
BROKEN = [
    (mask_sees_the_next_token, {"logits ignore later tokens", "cached = uncached"}, FORWARD),
    (cache_written_one_slot_late, {"cached = uncached"}, FORWARD),
    (head_apart_from_the_table, {"tied head = token table"}, FORWARD),
    (rows_begin_one_slot_early, {"padded batch = single prompts"}, FORWARD),
    (
        positions_run_through_documents,
        {"packed documents = each alone"},
        named("packed documents = each alone", "logits ignore later tokens"),
    ),
    (pieces_not_divided, {"4 microbatches = 1 batch"}, PIECES),
    (mean_of_the_pieces_means, {"4 microbatches = 1 batch"}, ()),
    (gradient_summed_over_devices, {"8 devices = 1 device"}, PIECES),
    (
        fast_products_round,
        {"fast operations = definitions", "tied head = token table"},  # the head is such a product
        named("fast operations = definitions", "tied head = token table", "cached = uncached"),
    ),
    (recomputed_with_another_epsilon, {"remat dots = no remat", "remat full = no remat"}, ()),
    (layers_stacked_wrongly, {"scanned layers = unrolled"}, named("scanned layers = unrolled")),
    (compiled_to_something_else, {"jit = op by op"}, ()),
    (loop_draws_with_another_number, {"sampler loop = unrolled"}, ()),
    (resume_loses_the_moments, {"resumed = uninterrupted"}, named("resumed = uninterrupted")),
    (checkpoint_rounds, {"checkpoint read = written", "export read = written"}, FILES),
    (export_rounds, {"export read = written"}, FILES),
    (export_swaps_queries_and_values, {"export read = written"}, FILES),
]


QUICK = (positions_run_through_documents, resume_loses_the_moments, checkpoint_rounds)
IN_CI = (mask_sees_the_next_token, pieces_not_divided)


@pytest.mark.ci
def test_every_law_holds() -> None:
    """Those that no planted bug below leaves intact, but for "jit = op by op", which compiles every operation."""
    broken = {"cached = uncached", "4 microbatches = 1 batch"}
    shown = {law.name for law in (*FORWARD, *PIECES)} - broken | {"jit = op by op"}
    found = rows(tiny(), tuple(law for law in OURS if law.name not in shown))
    assert all(row.ok is True for row in found.values()), found


@pytest.mark.parametrize(
    ("break_", "failing", "laws"),
    [
        *(
            pytest.param(
                b,
                failing,
                laws,
                marks=() if b in QUICK else pytest.mark.ci if b in IN_CI else pytest.mark.long,
            )
            for b, failing, laws in BROKEN
            if laws
        ),
        *(pytest.param(b, failing, OURS, marks=pytest.mark.long) for b, failing, _ in BROKEN),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_broken_build_fails_the_right_rows_and_no_others(
    break_: Callable[[Patch], None], failing: set[str], laws: tuple[Law, ...], monkeypatch: Patch
) -> None:
    lm = tiny()
    jax.clear_caches()  # programs without the fault
    break_(monkeypatch)
    assert {name for name, row in rows(lm, laws).items() if row.ok is False} == failing


def test_every_law_of_this_code_has_a_planted_bug() -> None:
    """The row about XLA has its own test, in a process without the flag; that about transformers has parity tests."""
    covered = set().union(*(failing for _, failing, _ in BROKEN))
    assert {law.name for law in OURS} - covered == {"XLA reductions = NumPy"}


def test_distance_is_relative_and_infinite_for_non_finite_numbers() -> None:
    a, b = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([1e-9])}, {"x": jnp.array([1.0, 2.0]), "y": jnp.array([0.0])}
    assert distance(a, a) == 0
    assert distance(a, b) == pytest.approx(1e-9 / 2e-3), "a leaf of zeros is measured against the others"
    assert distance({"x": a["x"] * 1.01}, {"x": b["x"]}) == pytest.approx(0.01, rel=1e-4)
    for bad in (jnp.nan, jnp.inf):
        assert distance(jnp.array([bad]), jnp.array([bad])) == float("inf")
    assert distance(jnp.zeros(2), jnp.zeros(3)) == float("inf")


def test_the_precision_is_set_only_while_a_law_is_measured() -> None:
    law = Law("precision", lambda _: float(jax.config.jax_default_matmul_precision != "highest"), 0.0)
    for row in verify(tiny(), [law, law]):
        assert row.ok
        assert jax.config.jax_default_matmul_precision is None


def test_lower_precision_raises() -> None:
    lm = tiny()
    with pytest.raises(UserError, match="float32"):
        next(verify(lm._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), lm.params))))


@pytest.mark.long
def test_a_context_of_one_token() -> None:
    """Laws that need more tokens are skipped; the others hold."""
    found = rows(tiny(block_size=1), LAWS[:5])
    assert [row.ok for row in found.values()] == [True, None, None, None, True]


@pytest.mark.long
def test_random_weights_have_no_zeros_or_ones() -> None:
    """Weights that are usually initialized to zero or one are perturbed: a constant would mask bugs."""
    lm = fresh(Config(model=small("scaled", init="zero-proj")))
    assert all(jnp.unique(leaf).size > 1 for leaf in jax.tree.leaves(lm.params))


@pytest.fixture
def few_laws(monkeypatch: Patch) -> None:
    def skip(_: object) -> float:
        raise Skipped("nothing to see")

    laws = (LAWS[3], Law("never", skip, 0.0))
    monkeypatch.setattr(sys.modules["jaxgpt.study.verify"], "LAWS", laws)


def test_command(tmp_path: Path, few_laws: None) -> None:
    run = run_folder(tmp_path / "run", small("gpt2"))
    text = jaxgpt("verify", str(run))
    assert text.code == 0, text.err
    assert "logits ignore later tokens" in text.out
    assert "skipped: never: nothing to see" in text.out
    assert "1 of 1 laws hold, 1 skipped" in text.out
    found = jaxgpt("verify", str(run), "--json").json
    assert found["ok"] is True
    assert [(row["name"], row["difference"], row["ok"]) for row in found["rows"]] == [
        ("logits ignore later tokens", 0.0, True),
        ("never", None, None),
    ]
    assert {"model", "dtype", "versions", "devices"} < set(found)
    assert "-reduce" in found["XLA_FLAGS"]
    shutil.copytree(run / "checkpoints/0", run / "checkpoints/5")
    text = jaxgpt("verify", str(run), "--checkpoint", "0")
    assert text.code == 1
    assert f"FAILED: checkpoint {run}/checkpoints/5: checkpoint.json has changed" in text.out


@pytest.mark.ci
def test_command_fails_if_a_law_fails(tmp_path: Path, monkeypatch: Patch) -> None:
    def raises(_: object) -> float:
        raise ValueError("two\nlines")

    laws = (
        Law("raises", raises, 0.0),
        Law("too far", lambda _: 0.5, 0.1, "mend it"),
        Law("nan", lambda _: jnp.nan, 1.0),
    )
    monkeypatch.setattr(sys.modules["jaxgpt.study.verify"], "LAWS", laws)
    text = jaxgpt("verify")
    assert text.code == 1
    assert "FAILED: raises: ValueError: two lines" in text.out
    assert "FAILED: too far: mend it" in text.out
    assert "0 of 3 laws hold" in text.out
    found = jaxgpt("verify", str(run_folder(tmp_path / "run", small("gpt2"))), "--json")
    assert found.code == 1
    assert [(row["difference"], row["ok"]) for row in found.json["rows"]] == [
        (None, False),
        (0.5, False),
        (None, False),
    ]
