"""A trained model: load, save, generate, explain."""

from jaxgpt.lm.explain import explain
from jaxgpt.lm.generation import Generation, Piece, generate, stream
from jaxgpt.lm.model import LM, load, model_functions, save

__all__ = ["LM", "Generation", "Piece", "explain", "generate", "load", "model_functions", "save", "stream"]
