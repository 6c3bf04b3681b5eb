"""The table: each law once, with its tolerance; and the rows that come of computing them.

Tolerances are relative to the largest number compared (`distance`), in units of what float32 gives: it rounds by
6e-8, and sums of a few hundred terms, taken in another order, differ by 1e-7 to 1e-6 of their size.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from jaxgpt import SAFE_FLAG
from jaxgpt.config import Config, UserError
from jaxgpt.data.tokenizer import make_tokenizer
from jaxgpt.lm import LM
from jaxgpt.model import GPT
from jaxgpt.model.params import init_params
from jaxgpt.study.verify import files, forward, training
from jaxgpt.study.verify.subject import Skipped, Subject

BITS = 0.0  # the same program or the same bytes: nothing may differ
SUMS = 1e-5  # the same sums in another order, once through the model
SLOPES = 1e-4  # the same, forward and back, and leaves whose terms cancel (see FLOOR)


class Law(NamedTuple):
    """An equivalence.

    Attributes:
        name: left side = right side.
        figure: how far apart they are; raises `Skipped` where it does not apply.
        tolerance: the largest figure that passes.
        fix: what to do where it fails, if that is known.
    """

    name: str
    figure: Callable[[Subject], float]
    tolerance: float
    fix: str = ""


class Row(NamedTuple):
    """What came of a law.

    Attributes:
        name: of the law.
        figure: measured; None where nothing finite was.
        tolerance: the largest figure that passes.
        ok: None where the law does not apply.
        seconds: it took.
        note: why it was skipped or failed.
    """

    name: str
    figure: float | None
    tolerance: float
    ok: bool | None
    seconds: float
    note: str = ""


LAWS = (
    Law("cached = uncached", forward.cached, SUMS),
    Law("ragged batch = each alone", forward.ragged, SUMS),
    Law("sampler's loop = unrolled", forward.loop, SUMS),
    Law("no token sees a later one", forward.leak, BITS),
    Law("tied head = token table", forward.tied, SUMS),
    Law("remat dots = none", partial(training.remat, policy="dots"), SLOPES),
    Law("remat full = none", partial(training.remat, policy="full"), SLOPES),
    Law("layers scanned = unrolled", training.scanned, SLOPES),
    Law("4 micro-batches = one batch", training.accumulation, SLOPES),
    Law("compiled = op by op", training.compiled, SLOPES),
    Law("8 devices = 1", training.devices, SLOPES),
    Law(
        "XLA's fused reductions = NumPy",
        training.hazard,
        SUMS,
        f"start Python with {SAFE_FLAG} in XLA_FLAGS, or import jaxgpt before JAX is used",
    ),
    Law("checkpoint read = written", files.saved, BITS),
    Law("export read = written", files.exported, BITS),
    Law("logits = transformers'", files.transformers, SUMS),
)


def verify(lm: LM, laws: Sequence[Law] = LAWS) -> Iterator[Row]:
    """A row for each law, as soon as it is known. Everything is computed in float32, whatever the run computes in.

    Args:
        lm: the model; its weights in float32.
        laws: which.

    Raises:
        UserError: weights in a lower precision.
    """
    if any(leaf.dtype != jax.numpy.float32 for leaf in jax.tree.leaves(lm.params)):
        raise UserError("the laws are those of float32 weights: load the model with weights='float32'")
    return _rows(lm, laws)


def _rows(lm: LM, laws: Sequence[Law]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as room, jax.default_matmul_precision("highest"):
        subject = Subject(lm, Path(room))
        for law in laws:
            yield _row(law, subject)


def _row(law: Law, subject: Subject) -> Row:
    began = time.perf_counter()
    figure: float | None = None
    ok, note = None, ""
    try:
        figure = law.figure(subject)
        ok = figure <= law.tolerance
        note = "" if ok else law.fix
    except Skipped as e:
        note = str(e)
    except Exception as e:
        ok, note = False, f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    if figure is not None and figure == float("inf"):
        figure, note = None, note or "not finite, or not the same tokens"
    return Row(law.name, figure, law.tolerance, ok, time.perf_counter() - began, note)


def fresh(config: Config, seed: int = 0) -> LM:
    """A model with random weights, those that begin at zero or one moved away from it: where they stand they hide much.

    Args:
        config: of a run; its vocabulary is known.
        seed: of the weights.
    """
    leaves, tree = jax.tree.flatten(init_params(GPT(replace(config.model, init="gpt2")), seed))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [leaf + 0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    tokenizer = make_tokenizer("ids", "", 0, config.model.vocab_size)
    return LM(config, jax.tree.unflatten(tree, moved), tokenizer)
