"""The post-processor of a tokenizer.json: make it prepend a token to each text, or prepend none."""

from __future__ import annotations

from typing import Any


def prepending(post_processor: Any, token_id: int, token: str) -> dict[str, Any]:
    """Return a post-processor that applies `post_processor`, unless it is None, and then prepends a token."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    if post_processor is None:
        return template
    return {"type": "Sequence", "processors": [post_processor, template]}


def not_prepending(post_processor: Any) -> Any:
    """Return a post-processor that prepends no token; None: no post-processor.

    Templates keep their other tokens, such as an end. The post-processors of BERT and RoBERTa, which add a token at both ends,
    are dropped.
    """
    if post_processor is None:
        return None
    match post_processor["type"]:
        case "Sequence":
            steps = [not_prepending(step) for step in post_processor["processors"]]
            return {"type": "Sequence", "processors": [step for step in steps if step is not None]}
        case "TemplateProcessing":
            without_start = {name: _without_start(post_processor[name]) for name in ("single", "pair")}
            return post_processor | without_start
        case "BertProcessing" | "RobertaProcessing":
            return None
    return post_processor


def _without_start(pieces: list[Any]) -> list[Any]:
    """Return the pieces of a template without the special tokens at its start."""
    start = 0
    while start < len(pieces) and "SpecialToken" in pieces[start]:
        start += 1
    return pieces[start:]
