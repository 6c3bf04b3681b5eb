"""Logits -> the next token: policies, the sampler, beam search, and ids -> text as they come."""

from jaxgpt.decoding.beam import Beams
from jaxgpt.decoding.engine import Session, compilations, search
from jaxgpt.decoding.policy import History, Policy, choose, warp
from jaxgpt.decoding.sampler import Model
from jaxgpt.decoding.text import TextStream

__all__ = ["Beams", "History", "Model", "Policy", "Session", "TextStream", "choose", "compilations", "search", "warp"]
