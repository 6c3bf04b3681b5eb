"""A trained model in the hand: load it, ask it for text, ask it why."""

from jaxgpt.lm.choice import explain
from jaxgpt.lm.generation import Generation, Piece, generate, stream
from jaxgpt.lm.model import LM, load, model_functions

__all__ = ["LM", "Generation", "Piece", "explain", "generate", "load", "model_functions", "stream"]
