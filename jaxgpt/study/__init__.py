"""Inspect a model: capture activations, verify invariants, benchmark."""

from jaxgpt.study.capture import Captured, CapturedGeneration, capture, capture_generation
from jaxgpt.study.verify import Row, fresh, verify

__all__ = ["Captured", "CapturedGeneration", "Row", "capture", "capture_generation", "fresh", "verify"]
