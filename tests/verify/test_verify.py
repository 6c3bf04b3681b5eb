"""All laws hold for correct code, and each planted bug fails the rows that it should and no others."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import run_folder
from helpers import MODELS, jaxgpt, make, small

from jaxgpt import kernels
from jaxgpt.checkpoint import store
from jaxgpt.config import Config, DataConfig
from jaxgpt.convert import export_model
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.decoding import TokenBuffer, sampler
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, buffers
from jaxgpt.lm.weights import quantize
from jaxgpt.model import embedding, gpt, moe
from jaxgpt.model.cache import KeysValues
from jaxgpt.ops import experts as ops_experts
from jaxgpt.ops import norms
from jaxgpt.ops.attention import Positions, Visible
from jaxgpt.train import loss, step
from jaxgpt.verify import LAWS, Law, forward, fresh, training, verify
from jaxgpt.verify.subject import NotApplicable, distance

OURS = LAWS[:-1]  # without transformers, which is slow to import
Patch = pytest.MonkeyPatch


def tiny(name: str = "gpt2", **changes: object) -> LM:
    """A model with a longer context than the windows of `verify`."""
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


def rounded(tree: Any) -> Any:
    """Change the last bit of every number."""
    return jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.float32(0)), tree)


def scaled(tree: Any, factor: float = 1.001) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor, tree)


# Each fault makes a wrong function of the right one.


def mask_sees_the_next_token(right: Any) -> Any:
    def mask(self: Visible) -> jax.Array:
        later = self.query._replace(position_BT=self.query.position_BT + 1)
        return right(replace(self, query=later, key=self.key or self.query))

    return mask


def cache_written_one_slot_late(right: Any) -> Any:
    return lambda cached, slot, new: right(cached, slot + 1, new)


def head_apart_from_the_table(_: Any) -> Any:
    return lambda self, x_BTD: x_BTD @ jax.lax.stop_gradient(self.embedding).T


def rows_begin_one_slot_early(right: Any) -> Any:
    def left_pad(*args: Any) -> TokenBuffer:
        text: TokenBuffer = right(*args)
        ids_BP = np.array(text.ids_BS)
        ids_BP[:, :-1][ids_BP[:, 1:] >= 0] = np.maximum(ids_BP[:, :-1], 0)[ids_BP[:, 1:] >= 0]
        return text._replace(ids_BS=ids_BP)  # type: ignore[arg-type]

    return left_pad


def positions_run_through_documents(_: Any) -> Any:
    return lambda ids: Positions(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), ids)


def pieces_not_divided(right: Any) -> Any:
    def gradients(*args: Any, accumulation: int, **how: Any) -> Any:
        loss, grads = right(*args, accumulation=accumulation, **how)
        return loss, scaled(grads, accumulation)

    return gradients


def mean_of_the_pieces_means(right: Any) -> Any:
    def gradients(params: Any, windows: jax.Array, key: Any, accumulation: int, **how: Any) -> Any:
        pieces = [right(params, piece, key, accumulation=1, **how) for piece in jnp.split(windows, accumulation)]
        return jax.tree.map(lambda *parts: sum(parts) / accumulation, *pieces)

    return gradients


def gradient_summed_over_devices(right: Any) -> Any:
    def gradients(*args: Any, **how: Any) -> Any:
        loss, grads = right(*args, **how)
        mesh = jax.sharding.get_abstract_mesh()
        return loss, scaled(grads, 1 if mesh.empty else mesh.size)

    return gradients


def fast_products_round(right: Any) -> Any:
    return right._replace(linear=lambda *args: right.linear(*args) * 1.001)


def recomputed_with_another_epsilon(_: Any) -> Any:
    return lambda block, **_: lambda config, *rest: block(replace(config, norm_eps=0.1), *rest)


def layers_stacked_wrongly(right: Any) -> Any:
    return lambda tree: scaled(right(tree))


def compiled_to_something_else(right: Any) -> Any:
    return lambda x, eps, edit: right(x, eps, edit) * (1.001 if jax.config.jax_disable_jit else 1.0)


def loop_draws_with_another_number(right: Any) -> Any:
    return lambda logits, text, keys, made, *others: right(logits, text, keys, made + 1, *others)


def resume_loses_the_moments(right: Any) -> Any:
    def restore(*args: Any) -> Any:
        state = right(*args)
        return state._replace(opt_state=scaled(state.opt_state, 0))

    return restore


def checkpoint_rounds(right: Any) -> Any:
    return lambda path, params, *rest: right(path, rounded(params), *rest)


def export_rounds(right: Any) -> Any:
    return lambda path, params, *rest: right(path, params | {"wpe": rounded(params["wpe"])}, *rest)


def export_swaps_queries_and_values(right: Any) -> Any:
    def save_weights(path: Any, params: Any, *rest: Any) -> None:
        attn = params["h_0"]["attn"]
        attn = attn | {"q_proj": attn["v_proj"], "v_proj": attn["q_proj"]}
        right(path, params | {"h_0": params["h_0"] | {"attn": attn}}, *rest)

    return save_weights


def least_preferred_experts(right: Any) -> Any:
    return lambda logits, *rest: right(-logits, *rest)


def balance_loss_not_minimized(right: Any) -> Any:
    return lambda sums, penalties: right(
        sums, {name: each for name, each in penalties.items() if name != "balance_loss"}
    )


def padding_counted(right: Any) -> Any:
    return lambda x_BTE, is_token_BT: right(x_BTE, jnp.ones_like(is_token_BT))


def named(*names: str) -> tuple[Law, ...]:
    return tuple(law for law in LAWS if law.name in names)


FORWARD = LAWS[:5]
PIECES = named("4 microbatches = 1 batch", "8 devices = 1 device")
FILES = named("checkpoint read = written", "export read = written")
EXPERTS = named("experts = NumPy", "router losses = formulas", "router losses ignore padding")

# A planted bug, its place, the rows that must fail, and the laws computed without --long (none: only with it).
BROKEN: list[tuple[Callable[[Any], Any], Any, str, set[str], tuple[Law, ...]]] = [
    (mask_sees_the_next_token, Visible, "mask", {"logits ignore later tokens", "cached = uncached"}, FORWARD),
    (cache_written_one_slot_late, KeysValues, "write", {"cached = uncached"}, FORWARD),
    (head_apart_from_the_table, embedding.Embedding, "logits", {"tied head = token table"}, FORWARD),
    (rows_begin_one_slot_early, buffers, "left_pad", {"padded batch = single prompts"}, FORWARD),
    (
        positions_run_through_documents, forward, "document_positions", {"packed documents = each alone"},
        named("packed documents = each alone", "logits ignore later tokens"),
    ),
    (pieces_not_divided, step, "gradients", {"4 microbatches = 1 batch"}, PIECES),
    (mean_of_the_pieces_means, step, "gradients", {"4 microbatches = 1 batch"}, ()),
    (gradient_summed_over_devices, step, "gradients", {"8 devices = 1 device"}, PIECES),
    (
        fast_products_round, kernels, "CPU",
        {"fast operations = definitions", "tied head = token table"},  # the head is such a product
        named("fast operations = definitions", "tied head = token table", "cached = uncached"),
    ),
    (recomputed_with_another_epsilon, gpt.nn, "remat", {"remat dots = no remat", "remat full = no remat"}, ()),
    (
        layers_stacked_wrongly, training, "stack_layers", {"scanned layers = unrolled"},
        named("scanned layers = unrolled"),
    ),
    (compiled_to_something_else, norms.NORMS, "layernorm", {"jit = op by op"}, named("jit = op by op")),
    (loop_draws_with_another_number, sampler, "sample_token", {"sampler loop = unrolled"}, ()),
    (
        resume_loses_the_moments, store, "restore", {"resumed = uninterrupted"},
        named("resumed = uninterrupted"),
    ),
    (
        checkpoint_rounds, sys.modules["jaxgpt.lm.model"], "save_params",
        {"checkpoint read = written", "export read = written"}, FILES,
    ),
    (export_rounds, export_model, "save_weights", {"export read = written"}, FILES),
    (export_swaps_queries_and_values, export_model, "save_weights", {"export read = written"}, FILES),
    (least_preferred_experts, moe, "route", {"experts = NumPy", "router losses = formulas"}, EXPERTS),
    (balance_loss_not_minimized, loss, "penalty_of", {"router losses = formulas"}, EXPERTS),
    (padding_counted, ops_experts, "row_mean", {"router losses ignore padding"}, EXPERTS),
]  # fmt: skip
OF_EXPERTS = (least_preferred_experts, balance_loss_not_minimized, padding_counted)


QUICK = (positions_run_through_documents, resume_loses_the_moments, checkpoint_rounds)
IN_CI = (mask_sees_the_next_token, pieces_not_divided, *OF_EXPERTS)


@pytest.mark.ci
def test_every_law_holds() -> None:
    """Test the laws that the tests of planted bugs do not compute, except "jit = op by op", which compiles slowly."""
    broken = {"cached = uncached", "4 microbatches = 1 batch"}
    shown = {law.name for law in (*FORWARD, *PIECES, *EXPERTS)} - broken | {"jit = op by op"}
    found = rows(tiny(), tuple(law for law in OURS if law.name not in shown))
    assert all(row.ok is True for row in found.values()), found


@pytest.mark.ci
def test_the_laws_of_experts_hold() -> None:
    """They are skipped for other models."""
    found = rows(tiny("experts"), EXPERTS)
    assert all(row.ok is True for row in found.values()), found
    assert all(row.ok is None for row in rows(tiny(), EXPERTS).values())


def cases() -> Iterator[Any]:
    for broken in BROKEN:
        mark = () if broken[0] in QUICK else pytest.mark.ci if broken[0] in IN_CI else pytest.mark.long
        if broken[-1]:
            yield pytest.param(*broken, marks=mark)
        yield pytest.param(*broken[:-1], OURS, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("fault", "owner", "name", "failing", "laws"), list(cases()), ids=lambda v: getattr(v, "__name__", "")
)
def test_a_broken_build_fails_the_right_rows_and_no_others(
    fault: Any, owner: Any, name: str, failing: set[str], laws: tuple[Law, ...], monkeypatch: Patch
) -> None:
    lm = tiny("experts" if fault in OF_EXPERTS else "gpt2")
    jax.clear_caches()  # programs without the fault
    if owner is norms.NORMS:
        monkeypatch.setitem(owner, name, fault(owner[name]))
    else:
        monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    assert {name for name, row in rows(lm, laws).items() if row.ok is False} == failing


def test_every_law_of_this_code_has_a_planted_bug() -> None:
    """The law of XLA has a test in a process without the flag, and the law of transformers has parity tests."""
    covered = set().union(*(failing for *_, failing, _ in BROKEN))
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


def test_stored_float32_weights_are_converted() -> None:
    lm = tiny()
    params = quantize(lm.params, lm.config.model, "float32")
    assert rows(lm._replace(params=params), named("tied head = token table"))["tied head = token table"].ok


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
        raise NotApplicable("nothing to see")

    laws = (LAWS[3], Law("never", skip, 0.0))
    monkeypatch.setattr(sys.modules["jaxgpt.verify"], "LAWS", laws)


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
        Law("too far", lambda _: 0.5, 0.1, fix="mend it"),
        Law("nan", lambda _: jnp.nan, 1.0),
    )
    monkeypatch.setattr(sys.modules["jaxgpt.verify"], "LAWS", laws)
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
