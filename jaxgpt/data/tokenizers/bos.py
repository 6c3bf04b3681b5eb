"""The beginning-of-text token: one rule for texts, documents, pairs and prompts, kept in tokenizer.json.

The rule is the post-processor of the tokenizer, which transformers and other programs read as well. `data.bos` changes it when
a run or a directory of tokens is created:

auto  the tokenizer decides
yes   texts begin with the token, even if the tokenizer did not prepend it
no    no text begins with the token

A text without documents is divided into windows for training and evaluation. The rule applies to each window, as to every
prompt.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.errors import UserError


def with_bos(tokenizer: Tokenizer, rule: str) -> Tokenizer:
    """Return a tokenizer that follows the rule; the tokenizer itself if it already does.

    Raises:
        UserError: if the rule is `yes`, and the tokenizer has no beginning-of-text token.
    """
    ids = text_bos(tokenizer, rule)
    if ids == tokenizer.bos_ids:
        return tokenizer
    assert isinstance(tokenizer, SubwordTokenizer)
    values = json.loads(tokenizer.to_json())
    before = values["post_processor"]
    if ids:
        values["post_processor"] = _prepending(before, ids[0], tokenizer.library.id_to_token(ids[0]))
    else:
        values["post_processor"] = _not_prepending(before)

    library = type(tokenizer.library)
    changed = SubwordTokenizer(call_tokenizers(lambda: library.from_str(json.dumps(values)), "this post-processor"))
    changed.special = tokenizer.special
    return changed


def text_bos(tokenizer: Tokenizer, rule: str) -> tuple[int, ...]:
    """Return the ids that begin a text under a rule, for a tokenizer that may follow a different rule.

    Raises:
        UserError: as in `with_bos`.
    """
    if rule == "no":
        return ()
    if rule == "auto" or tokenizer.bos_ids:
        return tokenizer.bos_ids

    bos_id = _declared_bos(tokenizer) if isinstance(tokenizer, SubwordTokenizer) else None
    if bos_id is None or bos_id >= tokenizer.vocab_size:
        raise UserError(
            "bos yes: the tokenizer has no beginning-of-text token; use bos auto, or add bos_token to tokenizer_config.json"
        )
    return (bos_id,)


def _declared_bos(tokenizer: SubwordTokenizer) -> int | None:
    """Return the id that the files of a model declare, by id or by name, even if the tokenizer does not prepend it."""
    special = tokenizer.special
    return _named_bos(tokenizer) if special.bos_id is None else special.bos_id


def _named_bos(tokenizer: SubwordTokenizer) -> int | None:
    """Return the id of the token with the name `bos_token`; None: no such token."""
    return tokenizer.library.token_to_id(tokenizer.special.names.get("bos_token", ""))


def document_bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids to write before a document: `bos_ids`, or () if they are the end-of-text id, which is written anyway."""
    return () if tokenizer.bos_ids == (tokenizer.eos_id,) else tokenizer.bos_ids


def decode_texts(tokenizer: Tokenizer, ids: np.ndarray, written: Collection[int] = ()) -> str:
    """Decode ids `[n]` to the original texts, without the ids that encoders add before and after each text.

    Each text is decoded separately, because tokenizers such as Llama 2's also prepend a space to each text.

    Args:
        tokenizer: the tokenizer of the model; its rule may differ from the rule of the data.
        ids: ids of texts with their beginning-of-text and end-of-text ids.
        written: beginning-of-text ids that the data record.
    """
    added = {*written, *tokenizer.bos_ids}
    if tokenizer.eos_id is not None:
        added.add(tokenizer.eos_id)
    if isinstance(tokenizer, SubwordTokenizer):
        # The files of a model may also declare ordinary tokens, such as a line break, as ends of texts.
        declared = {tokenizer.special.bos_id, _named_bos(tokenizer), *tokenizer.end_ids}
        tokens = tokenizer.library.get_added_tokens_decoder()
        added |= {i for i in declared if i is not None and i in tokens and tokens[i].special}
    is_added = np.isin(ids, [*added])
    texts = []
    for part in np.split(ids, np.flatnonzero(is_added)):
        text_ids = part[1:] if len(part) and part[0] in added else part
        if len(text_ids):
            texts.append(tokenizer.decode(text_ids))
    return tokenizer.separator.join(texts)


def bos_note(tokenizer: Tokenizer, used: tuple[int, ...], where: str) -> str:
    """Return a note for the description of data, such as "; <s> before each document".

    Args:
        tokenizer: the tokenizer of the model.
        used: beginning-of-text ids in the data.
        where: the place, such as "before each document".
    """
    if used:
        return f"; {tokenizer.decode(used)} {where}"
    if tokenizer.bos_ids and tokenizer.bos_ids != (tokenizer.eos_id,):
        return f"; no {tokenizer.decode(tokenizer.bos_ids)} {where}, unlike prompts"
    return ""


def _prepending(before: Any, bos_id: int, token: str) -> Any:
    """Return a post-processor that applies `before`, then prepends a token."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {token: {"id": token, "ids": [bos_id], "tokens": [token]}},
    }
    if before is None:
        return template
    return {"type": "Sequence", "processors": [before, template]}


def _not_prepending(value: Any) -> Any:
    """Return a post-processor that prepends no token, or None; templates keep other tokens, such as an end."""
    kind = value and value["type"]
    if kind == "Sequence":
        processors = [_not_prepending(processor) for processor in value["processors"]]
        return {"type": "Sequence", "processors": [processor for processor in processors if processor is not None]}
    if kind == "TemplateProcessing":
        return value | {key: _without_start(value[key]) for key in ("single", "pair")}
    if kind in ("BertProcessing", "RobertaProcessing"):
        return None
    return value


def _without_start(pieces: list[Any]) -> list[Any]:
    """Return the pieces of a template without the special tokens at its start."""
    start = 0
    while start < len(pieces) and "SpecialToken" in pieces[start]:
        start += 1
    return pieces[start:]
