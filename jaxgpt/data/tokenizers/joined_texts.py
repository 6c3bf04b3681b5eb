"""Decode the ids of several texts, separated by beginning-of-text and end-of-text ids."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import declared_bos
from jaxgpt.data.tokenizers.subword import SubwordTokenizer


def decode_texts(tokenizer: Tokenizer, ids: np.ndarray, written: Collection[int] = ()) -> str:
    """Decode ids `[n]` to the original texts, without the ids that encoders add before and after each text.

    Each text is decoded separately, because tokenizers such as Llama 2's also prepend a space to each text.

    Args:
        tokenizer: the tokenizer of the model; its rule may differ from the rule of the data.
        ids: ids of texts with their beginning-of-text and end-of-text ids.
        written: beginning-of-text ids that the data record.
    """
    added = _added_ids(tokenizer) | {*written}
    is_added = np.isin(ids, [*added])
    texts = []
    # Each part after the first begins with an added id, and so does the first if `ids` does.
    for part in np.split(ids, np.flatnonzero(is_added)):
        text_ids = part[1:] if len(part) and part[0] in added else part
        if len(text_ids):
            texts.append(tokenizer.decode(text_ids))
    return tokenizer.separator.join(texts)


def _added_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids that an encoder may add before or after a text."""
    added = {*tokenizer.bos_ids}
    if tokenizer.eos_id is not None:
        added.add(tokenizer.eos_id)
    if not isinstance(tokenizer, SubwordTokenizer):
        return added

    # The files of a model may also declare ordinary tokens, such as a line break, as ends of texts.
    tokens = tokenizer.library.get_added_tokens_decoder()
    declared = {*declared_bos(tokenizer), *tokenizer.end_ids}
    return added | {i for i in declared if i in tokens and tokens[i].special}
