"""The mathematics: embeddings, positions, norms, attention, MLP, cache. No files, no devices, no training."""

from jaxgpt.model.cache import KVCache, init_cache
from jaxgpt.model.gpt import GPT

__all__ = ["GPT", "KVCache", "init_cache"]
