"""Check on this machine that computations which must agree do, with the weights of a given model."""

from jaxgpt.study.verify.laws import LAWS, Law, LawResult, fresh, verify

__all__ = ["LAWS", "Law", "LawResult", "fresh", "verify"]
