"""Look inside a model, and let the program prove itself."""

from jaxgpt.study.capture import Captured, capture

__all__ = ["Captured", "capture"]
