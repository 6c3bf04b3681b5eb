"""Inspect a model: capture activations, verify invariants, benchmark."""

from jaxgpt.study.capture import Captured, Watched, capture, capture_generation
from jaxgpt.study.verify import Row, fresh, verify

__all__ = ["Captured", "Row", "Watched", "capture", "capture_generation", "fresh", "verify"]
