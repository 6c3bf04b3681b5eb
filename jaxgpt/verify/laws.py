"""The laws of `jaxgpt verify` with their tolerances, and their results.

Tolerances are relative to the largest magnitude in each array (`distance`). The relative rounding error of float32 is
6e-8; sums of a few hundred terms in a different order have relative differences of 1e-7 to 1e-6.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from jaxgpt.config import Config
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.errors import UserError, one_line
from jaxgpt.lm import LM
from jaxgpt.lm.weights import dequantize
from jaxgpt.model import GPT
from jaxgpt.model.init import init_params
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.runtime import SAFE_FLAG
from jaxgpt.verify import experts, forward, training
from jaxgpt.verify.subject import NotApplicable, Subject

EQUAL = 0.0  # tolerance for the same program or the same bytes
SUMS = 1e-5  # tolerance for sums in a different order, in a forward pass
GRADIENTS = 1e-4  # tolerance for forward and backward passes, including gradients that are zero in theory


# A function from a subject to the difference of two results; it raises `NotApplicable` if the law does not apply.
Measure = Callable[[Subject], float]


class Law(NamedTuple):
    """An equivalence of two computations."""

    name: str  # name of the law, such as "cached = uncached"
    measure: Measure
    tolerance: float  # the largest difference that passes
    tokens: int = 1  # minimum context length
    fix: str = ""  # advice for the user if the law fails


class LawResult(NamedTuple):
    """The result of a law."""

    name: str
    difference: float | None  # difference of the results; None: non-finite, or not measured
    tolerance: float  # the largest difference that passes
    ok: bool | None  # whether the law holds; None: skipped
    seconds: float  # wall-clock time
    note: str = ""  # reason for the skip or failure, or the law's fix


LAWS = (
    Law("cached = uncached", forward.cached, SUMS),
    Law("padded batch = single prompts", forward.padded, SUMS, tokens=2),
    Law("sampler loop = unrolled", forward.sampler_loop, SUMS, tokens=3),
    Law("logits ignore later tokens", forward.causal, EQUAL, tokens=2),
    Law("tied head = token table", forward.tied, SUMS),
    Law("packed documents = each alone", forward.documents, SUMS, tokens=2),
    Law("fast operations = definitions", training.operations, GRADIENTS),
    Law("remat dots = no remat", partial(training.remat, policy="dots"), GRADIENTS),
    Law("remat full = no remat", partial(training.remat, policy="full"), GRADIENTS),
    Law("scanned layers = unrolled", training.scanned, GRADIENTS),
    Law("experts = NumPy", experts.routed, SUMS),
    Law("router losses = formulas", experts.losses, GRADIENTS),
    Law("router losses ignore padding", experts.padded, SUMS, tokens=2),
    Law("4 microbatches = 1 batch", training.accumulation, GRADIENTS),
    Law("jit = op by op", training.compiled, GRADIENTS),
    Law("8 devices = 1 device", training.devices, GRADIENTS),
    Law(
        "XLA reductions = NumPy",
        training.fused_reductions,
        SUMS,
        fix=f"start Python with {SAFE_FLAG} in XLA_FLAGS, or import jaxgpt before JAX is used",
    ),
    Law("checkpoint read = written", training.saved, EQUAL),
    Law("resumed = uninterrupted", training.resumed, EQUAL),
    Law("export read = written", training.exported, EQUAL),
    Law("logits = transformers", training.transformers, SUMS),
)


def verify(lm: LM, laws: Sequence[Law] = LAWS, progress: Progress = NO_PROGRESS) -> Iterator[LawResult]:
    """Measure each law in float32, regardless of the run's compute dtype, and yield its result.

    Each law is a stage of `progress`. Raises `UserError` if the weights are not float32.
    """
    if any(leaf.dtype != jax.numpy.float32 for leaf in jax.tree.leaves(lm.params)):
        raise UserError("verify needs float32 weights: load the model with weights=None")
    with tempfile.TemporaryDirectory() as directory:
        subject = Subject(lm._replace(params=dequantize(lm.params)), Path(directory))
        for law in laws:
            progress.stage(f"verifying: {law.name}")
            start = time.perf_counter()
            result = _measured(law, subject)
            yield result._replace(seconds=time.perf_counter() - start)


def _measured(law: Law, subject: Subject) -> LawResult:
    """Measure a law; the caller adds the time."""

    def result(ok: bool | None, note: str, difference: float | None = None) -> LawResult:
        return LawResult(law.name, difference, law.tolerance, ok, seconds=0.0, note=note)

    if subject.length < law.tokens:
        return result(None, f"needs a context length of at least {law.tokens}, not {subject.length}")
    try:
        with jax.default_matmul_precision("highest"):
            difference = law.measure(subject)
    except NotApplicable as e:
        return result(None, str(e))
    except Exception as e:
        return result(False, f"{type(e).__name__}: {one_line(e, 300)}")

    if not math.isfinite(difference):
        return result(False, law.fix or "non-finite values or different tokens")
    if difference > law.tolerance:
        return result(False, law.fix, difference)
    return result(True, "", difference)


def fresh(config: Config, seed: int = 0) -> LM:
    """Make a model with random weights, including weights that are usually initialized to zero or one.

    Zeros and ones would mask errors: for example, a zero bias has no effect even in the wrong place. `config` has
    `model.vocab_size` set.
    """
    params = init_params(GPT(replace(config.model, init="gpt2")), seed)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.tree.unflatten(tree, list(jax.random.split(jax.random.key(seed + 1), len(leaves))))
    noisy = jax.tree.map(lambda leaf, key: leaf + 0.05 * jax.random.normal(key, leaf.shape), params, keys)
    return LM(config, noisy, make_tokenizer("ids", "", 0, config.model.vocab_size))
