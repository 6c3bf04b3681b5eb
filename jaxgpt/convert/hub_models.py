"""Download models from the Hugging Face Hub for import."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jaxgpt.convert.files import SECOND_COPY
from jaxgpt.data.tokenizers.new import GPT2_REPO, GPT2_REVISION
from jaxgpt.errors import UserError
from jaxgpt.hub import download

# Glob patterns of the files that an import reads.
PATTERNS = [
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "README.md",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
PINNED = {GPT2_REPO: GPT2_REVISION}  # map from a repository to its commit
# Map from the bare names of OpenAI's GPT-2 models to their repositories.
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


class Download(NamedTuple):
    """A downloaded repository."""

    directory: Path
    commit: str


def fetch_model(name: str, revision: str = "") -> Download:
    """Return the local directory and commit of a hub repository, downloaded to the hub's cache if needed.

    Args:
        name: `owner/name`, or the bare name of one of OpenAI's four GPT-2 models.
        revision: commit, tag or branch; empty: the commit in `PINNED`, otherwise main.

    Raises:
        UserError: if the name is invalid, or the download fails.
    """
    repo = ALIASES.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UserError(f"{name} is not a file, a directory or a hub repository (owner/name): correct the name")
    if not revision:
        revision = PINNED.get(repo, "main")
    directory = download(repo, PATTERNS, revision=revision, ignore=[SECOND_COPY])
    return Download(directory, directory.name)  # the cache has a directory for each commit
