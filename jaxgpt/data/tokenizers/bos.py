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

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.post_processor import not_prepending, prepending
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, read_library
from jaxgpt.errors import UserError


def with_bos(tokenizer: Tokenizer, rule: str) -> Tokenizer:
    """Return a tokenizer that follows the rule; the tokenizer itself if it already does.

    Raises:
        UserError: if the rule is `yes`, and the tokenizer has no beginning-of-text token.
    """
    ids = text_bos(tokenizer, rule)
    if ids == tokenizer.bos_ids:
        return tokenizer

    assert isinstance(tokenizer, SubwordTokenizer)  # other tokenizers have no such token
    values = json.loads(tokenizer.to_json())
    if ids:
        [bos_id] = ids
        token = tokenizer.library.id_to_token(bos_id)
        values["post_processor"] = prepending(values["post_processor"], bos_id, token)
    else:
        values["post_processor"] = not_prepending(values["post_processor"])
    changed = SubwordTokenizer(read_library(json.dumps(values), "this post-processor"))
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

    declared = declared_bos(tokenizer)
    bos_id = declared[0] if declared else None
    if bos_id is None or bos_id >= tokenizer.vocab_size:
        raise UserError(
            "bos yes: the tokenizer has no beginning-of-text token; use bos auto, or add bos_token to tokenizer_config.json"
        )
    return (bos_id,)


def declared_bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the beginning-of-text ids that the files of a model declare, even if the tokenizer does not prepend them.

    There are at most two: the id in generation_config.json, which has precedence, and the id of the token `bos_token` in
    tokenizer_config.json.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        return ()
    named = tokenizer.library.token_to_id(tokenizer.special.names.get("bos_token", ""))
    return tuple(i for i in (tokenizer.special.bos_id, named) if i is not None)


def document_bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids to write before a document: `bos_ids`, or () if they are the end-of-text id, which is written anyway."""
    return () if tokenizer.bos_ids == (tokenizer.eos_id,) else tokenizer.bos_ids


def bos_note(tokenizer: Tokenizer, used: tuple[int, ...], where: str) -> str:
    """Return a note for the description of data, such as "; <s> before each document".

    The note is "" if the data have no such token, and prompts begin with no token or with the end-of-text token.

    Args:
        tokenizer: the tokenizer of the model.
        used: beginning-of-text ids in the data.
        where: the place, such as "before each document".
    """
    if used:
        return f"; {tokenizer.decode(used)} {where}"
    expected = document_bos(tokenizer)
    if expected:
        return f"; no {tokenizer.decode(expected)} {where}, unlike prompts"
    return ""
