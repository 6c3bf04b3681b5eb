"""A trained model: load, save, generate, chat, explain, score."""

from jaxgpt.lm.conversation import Chat, chat
from jaxgpt.lm.explain import explain
from jaxgpt.lm.generation import generate, stream
from jaxgpt.lm.model import LM, load, save
from jaxgpt.lm.results import Generation, Piece
from jaxgpt.lm.sampler import sampler_of
from jaxgpt.lm.score import Score, score

__all__ = [
    "LM",
    "Chat",
    "Generation",
    "Piece",
    "Score",
    "chat",
    "explain",
    "generate",
    "load",
    "sampler_of",
    "save",
    "score",
    "stream",
]
