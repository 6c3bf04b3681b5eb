"""Inspect a model: activations, heads, logit lens, attribution, ablation, patching."""

from jaxgpt.study.attribution import Attribution, attribution
from jaxgpt.study.heads import Heads, entropy, heads, induction_score, previous_score, repeated_tokens
from jaxgpt.study.interventions import Ablation, LogitDifference, Patching, ablate_heads, patch
from jaxgpt.study.lens import Lens, lens
from jaxgpt.study.observer import ForwardPass
from jaxgpt.study.run import Captured, Generated, capture, generate, names, run

__all__ = [
    "Ablation",
    "Attribution",
    "Captured",
    "ForwardPass",
    "Generated",
    "Heads",
    "Lens",
    "LogitDifference",
    "Patching",
    "ablate_heads",
    "attribution",
    "capture",
    "entropy",
    "generate",
    "heads",
    "induction_score",
    "lens",
    "names",
    "patch",
    "previous_score",
    "repeated_tokens",
    "run",
]
