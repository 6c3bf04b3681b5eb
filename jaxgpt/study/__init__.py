"""Look inside a model, and let the program prove itself."""

from jaxgpt.study.capture import Captured, capture
from jaxgpt.study.verify import Row, fresh, verify

__all__ = ["Captured", "Row", "capture", "fresh", "verify"]
