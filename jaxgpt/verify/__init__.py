"""Check on this machine that equivalent computations agree, with the weights of a given model."""

from jaxgpt.verify.laws import LAWS, Law, LawResult, fresh, verify

__all__ = ["LAWS", "Law", "LawResult", "fresh", "verify"]
