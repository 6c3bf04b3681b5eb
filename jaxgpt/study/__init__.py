"""Inspect a model: read and edit activations, ask questions of them, verify invariants, benchmark."""

from jaxgpt.study.heads import (
    Heads,
    entropy,
    heads,
    induction_score,
    previous_score,
    repeated_tokens,
    rollout,
)
from jaxgpt.study.interventions import Ablation, LogitDifference, Patching, ablate_heads, ablate_neurons, patch
from jaxgpt.study.lens import Attribution, Lens, Neighbours, attribution, lens, neighbours
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
    "Neighbours",
    "Patching",
    "ablate_heads",
    "ablate_neurons",
    "attribution",
    "capture",
    "entropy",
    "fresh",
    "generate",
    "heads",
    "induction_score",
    "lens",
    "names",
    "neighbours",
    "patch",
    "previous_score",
    "repeated_tokens",
    "rollout",
    "run",
    "verify",
]
