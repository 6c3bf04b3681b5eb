"""Tokenizer classes of transformers with options that have precedence over tokenizer.json.

Most classes use tokenizer.json as it is. The classes here build a new tokenizer from its vocabulary, so tokenizer_config.json
decides whether a text begins with a space, as in transformers 5.24. Words are split as in tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

BYTE_LEVEL = ("GPT2Tokenizer", "GPTNeoXTokenizer")
SENTENCEPIECE = ("LlamaTokenizer", "CodeLlamaTokenizer")
# Class of a model type if no file specifies a class.
CLASS_OF = {
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "olmoe": "GPTNeoXTokenizer",
}
# Types of models that use tokenizer.json as it is, regardless of the class in their files.
AS_IN_FILE = ("llava", "mistral", "mistral3", "mixtral", "olmo2", "qwen2")
SPACE = "\u2581"  # replaces spaces in SentencePiece vocabularies
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}


class TokenizerClass(NamedTuple):
    """A transformers tokenizer class, and the content of tokenizer_config.json."""

    name: str  # without "Fast"; empty: tokenizer.json is used as it is
    options: Mapping[str, Any]

    @property
    def keeps_bos(self) -> bool:
        """Whether tokenizer.json may add a beginning-of-text token. GPT-NeoX's class removes this token."""
        return self.name != "GPTNeoXTokenizer"

    def apply(self, tokenizer_json: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a tokenizer.json that begins texts with a space if the class does."""
        words = tokenizer_json.get("pre_tokenizer") or {}
        if self.name in BYTE_LEVEL and _type(words) == "ByteLevel":
            adds_space = self.options.get("add_prefix_space", False) is True
            return {**tokenizer_json, "pre_tokenizer": {**words, "add_prefix_space": adds_space}}
        if self.name in SENTENCEPIECE and _only_replaces_spaces(tokenizer_json):
            return {**tokenizer_json, **self._spaces()}
        return tokenizer_json

    def _spaces(self) -> dict[str, Any]:
        """Return the parts of a tokenizer.json that replace and restore spaces."""
        is_code = self.name == "CodeLlamaTokenizer"
        option = self.options.get("add_prefix_space")
        adds_space = option is None or bool(option)

        # A space is added at the beginning of a text and after each special token ("always"), only at the beginning ("first"),
        # or never. Code Llama's class ignores the option `legacy`.
        if not adds_space:
            scheme = "never"
        elif self.options.get("legacy") and not is_code:
            scheme = "always"
        else:
            scheme = "first"

        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        # The decoder removes the added space. Code Llama's decoder removes a space even if none is added.
        if adds_space or is_code:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False},
            "decoder": {"type": "Sequence", "decoders": decoders},
        }


# tokenizer.json is used as it is.
NO_CLASS = TokenizerClass(name="", options={})


def read_class(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerClass:
    """Return the class that transformers uses, from the contents of tokenizer_config.json and of the model's config.json."""
    kind = config.get("model_type")
    if kind in AS_IN_FILE:
        return NO_CLASS
    name = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class") or CLASS_OF.get(str(kind), "")
    return TokenizerClass(str(name).removesuffix("Fast"), tokenizer_config)


def _only_replaces_spaces(tokenizer_json: Mapping[str, Any]) -> bool:
    """Return whether a BPE prepares a text only by `Prepend` and `Replace`, or by `Metaspace`.

    The class would drop other steps, such as a Unicode normalization used in training. A tokenizer with such steps is not
    changed.
    """
    normalizer = tokenizer_json.get("normalizer")
    words = tokenizer_json.get("pre_tokenizer") or {}
    if _type(tokenizer_json.get("model")) != "BPE":
        return False
    if normalizer is None:
        return _type(words) == "Metaspace" and words.get("replacement") == SPACE
    steps = normalizer.get("normalizers", [normalizer])
    return not words and steps in ([REPLACE], [PREPEND, REPLACE])


def _type(part: Any) -> str | None:
    """Return the type of a part of tokenizer.json, or None."""
    return part.get("type") if isinstance(part, dict) else None
