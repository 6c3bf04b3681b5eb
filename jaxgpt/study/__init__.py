"""Inspect a model: activations, attribution, ablation, patching, invariants, benchmarks."""

from jaxgpt.study.heads import Heads, entropy, heads, induction_score, previous_score, repeated_tokens
from jaxgpt.study.interventions import Ablation, LogitDifference, Patching, ablate_heads, patch
from jaxgpt.study.lens import Attribution, Lens, attribution, lens
from jaxgpt.study.run import Captured, ForwardPass, Generated, capture, generate, names, run
from jaxgpt.study.verify import LawResult, fresh, verify

__all__ = [
    "Ablation",
    "Attribution",
    "Captured",
    "ForwardPass",
    "Generated",
    "Heads",
    "LawResult",
    "Lens",
    "LogitDifference",
    "Patching",
    "ablate_heads",
    "attribution",
    "capture",
    "entropy",
    "fresh",
    "generate",
    "heads",
    "induction_score",
    "lens",
    "names",
    "patch",
    "previous_score",
    "repeated_tokens",
    "run",
    "verify",
]
