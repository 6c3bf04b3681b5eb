"""The equivalence certificate: laws that must hold of a model, computed on the machine and with the weights at hand."""

from jaxgpt.study.verify.rows import LAWS, Law, Row, fresh, verify

__all__ = ["LAWS", "Law", "Row", "fresh", "verify"]
