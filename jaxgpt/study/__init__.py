"""Look inside a model, and let the program prove itself."""

from jaxgpt.study.capture import Captured, Watched, capture, capture_generation

__all__ = ["Captured", "Watched", "capture", "capture_generation"]
