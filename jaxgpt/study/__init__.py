"""Inspect a model: read and edit activations, verify invariants, benchmark."""

from jaxgpt.study.capture import Captured, CapturedGeneration, capture, capture_generation
from jaxgpt.study.run import Generated, Run, generate, names, run
from jaxgpt.study.verify import Row, fresh, verify

__all__ = [
    "Captured",
    "CapturedGeneration",
    "Generated",
    "Row",
    "Run",
    "capture",
    "capture_generation",
    "fresh",
    "generate",
    "names",
    "run",
    "verify",
]
