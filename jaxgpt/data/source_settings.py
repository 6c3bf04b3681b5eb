"""Sources of data in the settings of a run: what they hold, and checks before they are opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.chat.files import check_conversations
from jaxgpt.data.preferences import check_preferences
from jaxgpt.data.prompt_records import check_prompts
from jaxgpt.data.token_files import is_token_path
from jaxgpt.data_files import holds_conversations, located
from jaxgpt.errors import UserError
from jaxgpt.files import check_kind
from jaxgpt.mix import path_of, split_phases
from jaxgpt.post_settings import PostConfig

Kind = Literal["text", "token ids", "conversations", "preference pairs", "prompts"]


def check_sources(config: Config, tokens: int = 0) -> None:
    """Check that the paths exist and that records are valid, before slow work, such as reading weights.

    Args:
        config: config of a run or preset; its `data` and `directory` are used.
        tokens: number of training tokens so far; the sources of mixtures that have ended are not checked.

    Raises:
        UserError: if a path is missing, or a record is not a conversation, preference pair or prompt, as the objective needs.
    """
    for each in remaining_sources(config.data, tokens):
        found = located(each, config.directory)
        kind = kind_of(config, found)
        if kind == "conversations":
            check_conversations(Path(found.path), found.on_error)
        elif kind == "preference pairs":
            check_preferences(Path(found.path), found.on_error)
        elif kind == "prompts":
            check_prompts(Path(found.path), found.on_error)


def check_windows_begin(config: Config, setting: str) -> None:
    """Check that a setting for the beginning-of-text token of windows has an effect, which needs a source of text.

    Raises:
        UserError: if a path is missing, or no source is a text.
    """
    found = [located(each, config.directory) for each in config.data.sources]
    kinds = {kind_of(config, each): each.path for each in found}
    if "text" not in kinds:
        kind, path = next(iter(kinds.items()))
        raise UserError(
            f"{setting} applies only to windows of a text, but {path} holds {kind}: omit it; the tokenizer of the run, the "
            f"chat template or the token files determine the beginning-of-text tokens of such data"
        )


def remaining_sources(data: DataConfig, tokens: int) -> list[DataConfig]:
    """Return the settings of the sources of the mixtures that have not ended after `tokens` training tokens."""
    phases = data.phases
    ends = [phase.tokens for phase in phases[1:]]
    current = sum(end <= tokens for end in ends)  # index of the current mixture
    needed = {path for phase in phases[current:] for path in data.weights(phase)}
    return [each for each in data.sources if each.path in needed]


def with_path(config: Config, path: str) -> Config:
    """Return a config for evaluation on `path` (only validation files, if any); empty path: on the last mixture."""
    if not path:
        return replace(config, data=config.data.with_last_mixture())
    return replace(config, data=replace(config.data, path=path, mix=(), train_fraction=1.0), directory="")


def check_spellings(words: Sequence[str]) -> None:
    """Raise `UserError` if words of `data.mix` spell a path in two ways, such as `a` and `./a`: it would be two sources."""
    spelled: dict[str, str] = {}
    for phase in split_phases(words):
        for path in map(path_of, phase.words):
            other = spelled.setdefault(os.path.realpath(path), path)
            if other != path:
                raise UserError(f"data.mix lists the same data twice, as {other} and {path}: write the path in one way")


def kind_of(config: Config, data: DataConfig) -> Kind:
    """Return the kind of data of a source.

    Raises:
        UserError: if the path is neither a file nor a directory, the objective needs a different kind, or `data.stride` does
            not apply to the kind.
    """
    if data.path and Path(data.path).exists():
        check_kind(Path(data.path))
    post = config.post
    needed = _needed_kind(post)
    if holds_conversations(data):
        if data.stride:
            raise UserError(f"data.stride {data.stride} does not apply to conversations: set it to 0")
        return needed or "conversations"

    kind: Kind = "token ids" if data.path and is_token_path(Path(data.path)) else "text"
    if needed is None:
        return kind
    name = needed.split()[-1]  # pairs or prompts
    if not data.path and data.dataset == "none":
        raise UserError(f"post.objective {post.objective} needs {needed}: add --data.path {name}.jsonl")
    source = data.path or f"the built-in text {data.dataset}"
    raise UserError(
        f"post.objective {post.objective} needs {needed} (.jsonl, .json or .parquet), but {source} holds {kind}: pass "
        f"{name} with --data.path, or omit post.objective"
    )


def _needed_kind(post: PostConfig) -> Kind | None:
    """Return the kind of data that an objective needs; None: text, token ids or conversations."""
    if post.is_preference:
        return "preference pairs"
    if post.is_rollout:
        return "prompts"
    return None
