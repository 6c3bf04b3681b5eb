"""The model: linen modules that own the parameters and call `ops`, and the key/value cache."""

from jaxgpt.model.cache import KVCache, init_cache
from jaxgpt.model.gpt import GPT

__all__ = ["GPT", "KVCache", "init_cache"]
