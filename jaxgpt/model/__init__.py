"""The model: linen modules that declare the parameters and call `ops`, and the key/value cache."""

from jaxgpt.model.cache import KVCache
from jaxgpt.model.gpt import GPT

__all__ = ["GPT", "KVCache"]
