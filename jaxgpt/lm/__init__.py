"""A trained model: load, save, generate, chat, explain."""

from jaxgpt.lm.conversation import Chat, chat
from jaxgpt.lm.explain import explain
from jaxgpt.lm.generation import Generation, Piece, generate, stream
from jaxgpt.lm.model import LM, load, sampler_of, save

__all__ = ["LM", "Chat", "Generation", "Piece", "chat", "explain", "generate", "load", "sampler_of", "save", "stream"]
