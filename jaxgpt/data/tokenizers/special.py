"""Special tokens of a model and its chat templates, as defined in transformers files (`special_files`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Names of special tokens in chat templates. A model may have further names, such as `image_token`.
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
EXTRA = "extra_special_tokens"  # named tokens of this model only; in files of transformers 5, also a list without names
EXTRA_BEFORE_5 = "additional_special_tokens"  # a list of tokens without names
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # options of generation_config.json


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a model: the contents of two files, which export writes back."""

    # Content of generation_config.json; missing ids are filled in from config.json.
    generation: Mapping[str, Any] = field(default_factory=dict)
    # Entries of tokenizer_config.json: tokens by name (None: declared as null), and chat templates, one as a string, several
    # as `[{"name": ..., "template": ...}, ...]`. The other files of tokens and templates are merged into these entries.
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()  # names of tokens that the vocabulary lacks

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return tuple(dict.fromkeys(_ids_of(self.generation.get("eos_token_id"))))

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-text token, even if the tokenizer does not prepend it."""
        ids = _ids_of(self.generation.get("bos_token_id"))
        return ids[0] if ids else None

    @property
    def names(self) -> dict[str, str]:
        """Special tokens, keyed by their names in chat templates."""
        return {name: token for name, token in self._entries() if token and name not in self.missing}

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a chat template: `names`, and "" for each token that the tokenizer declares as null."""
        return self.names | {name: "" for name, token in self._entries() if token is None}

    def without(self, tokens: Collection[str], size: int) -> SpecialTokens:
        """Return the special tokens of a vocabulary that lacks some tokens, and all ids of `size` or above."""
        generation = dict(self.generation)
        for name in IDS:
            ids = _ids_of(generation.get(name))
            kept = [i for i in ids if i < size]
            if len(kept) < len(ids):
                generation[name] = kept or None
        lost = {name for name, token in self._entries() if token in tokens}
        return replace(self, generation=generation, missing=self.missing | lost)

    @property
    def templates(self) -> dict[str, str]:
        """Jinja sources of the chat templates, keyed by name; a single template without a name is the default."""
        templates = self.tokenizer.get("chat_template")
        if isinstance(templates, list):
            return {named["name"]: named["template"] for named in templates}
        return {} if templates is None else {"default": templates}

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template; None: the model has no template."""
        return self.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """Jinja source of the chat template for conversations with tools, as in transformers; None: no template."""
        return self.templates.get("tool_use", self.chat_template)

    @property
    def tokens(self) -> set[str]:
        """All special tokens, with and without a name, including tokens that the vocabulary lacks."""
        return {token for _, token in self._entries() if token} | set(self.tokenizer.get(EXTRA_BEFORE_5, ()))

    def _entries(self) -> Iterator[tuple[str, str | None]]:
        """Yield the names in tokenizer_config.json with their tokens; None: declared as null."""
        for name in TOKENS:
            if name in self.tokenizer:
                yield name, self.tokenizer[name]
        yield from self.tokenizer.get(EXTRA, {}).items()


def _ids_of(value: Any) -> list[int]:
    """Convert an id, a list of ids or None to a list of ids, without negative ids."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if i >= 0]
