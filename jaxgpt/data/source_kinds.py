"""The kind of data that each source of a run holds, and checks of the kinds before slow work."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.chat.files import RecordKind, check_records
from jaxgpt.data.chat.records import CONVERSATIONS
from jaxgpt.data.preference_records import PREFERENCE_PAIRS
from jaxgpt.data.prompt_records import PROMPTS
from jaxgpt.data.token_files import is_token_path
from jaxgpt.data_files import holds_conversations, located
from jaxgpt.errors import UserError
from jaxgpt.files import check_kind
from jaxgpt.post_settings import PostConfig

Kind = Literal["text", "token ids", "conversations", "preference pairs", "prompts"]
# The kinds that are read from files of records.
RECORD_KINDS: dict[Kind, RecordKind[Any]] = {
    "conversations": CONVERSATIONS,
    "preference pairs": PREFERENCE_PAIRS,
    "prompts": PROMPTS,
}


def check_sources(config: Config, tokens: int = 0) -> None:
    """Check that the paths exist and that records are valid, before slow work, such as reading weights.

    Args:
        config: config of a run or preset; uses `data`, `post` and `directory`.
        tokens: number of training tokens so far; the sources of mixtures that have ended are not checked.

    Raises:
        UserError: if a path is missing, or a record is not a conversation, preference pair or prompt, as the objective needs.
    """
    for each in config.data.remaining_sources(tokens):
        found = located(each, config.directory)
        kind = kind_of(config, found)
        if kind in RECORD_KINDS:
            check_records(Path(found.path), RECORD_KINDS[kind], found.on_error)


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
            "chat template or the token files determine the beginning-of-text tokens of such data"
        )


def kind_of(config: Config, data: DataConfig) -> Kind:
    """Return the kind of data of a source.

    Raises:
        UserError: if the path is neither a file nor a directory, the objective needs a different kind, or `data.stride` does
            not apply to the kind.
    """
    if data.path and Path(data.path).exists():
        check_kind(Path(data.path))
    needed = _needed_kind(config.post)
    if holds_conversations(data):
        if data.stride:
            raise UserError(f"data.stride {data.stride} does not apply to conversations: set it to 0")
        return needed or "conversations"

    found: Kind = "token ids" if data.path and is_token_path(Path(data.path)) else "text"
    if needed:
        raise _needs(needed, config.post, data, found)
    return found


def _needed_kind(post: PostConfig) -> Kind | None:
    """Return the kind of data that an objective needs; None: text, token ids or conversations."""
    if post.is_preference:
        return "preference pairs"
    if post.is_rollout:
        return "prompts"
    return None


def _needs(needed: Kind, post: PostConfig, data: DataConfig, found: Kind) -> UserError:
    """Return the error for an objective that needs pairs or prompts, but has no data, or data of the kind `found`."""
    name = needed.split()[-1]  # pairs or prompts
    if not data.path and data.dataset == "none":
        return UserError(f"post.objective {post.objective} needs {needed}: add --data.path {name}.jsonl")
    source = data.path or f"the built-in text {data.dataset}"
    return UserError(
        f"post.objective {post.objective} needs {needed} (.jsonl, .json or .parquet), but {source} holds {found}: pass "
        f"{name} with --data.path, or omit post.objective"
    )
