"""Download one revision of a model from the Hugging Face hub: safetensors, JSON, chat template."""

from __future__ import annotations

import re
from pathlib import Path

from jaxgpt.data.tokenizer_files import GPT2_REPO, GPT2_REVISION
from jaxgpt.errors import UserError
from jaxgpt.hub import download

PATTERNS = (
    "config.json generation_config.json adapter_config.json *.safetensors *.safetensors.index.json tokenizer.json "
    "tokenizer_config.json chat_template.jinja"
).split()
SECOND_COPY = ["consolidated*"]  # patterns of files to skip: Mistral's own weight format
PINNED = {GPT2_REPO: GPT2_REVISION}
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


def fetch_model(name: str, revision: str = "") -> tuple[Path, str]:
    """Return the local directory and the commit of a hub repository; download it to the hub's cache if needed.

    `name` is `owner/name`, or the bare name of one of OpenAI's four GPT-2 models. `revision` is a commit, tag or branch;
    empty: the pinned commit if there is one, otherwise main. Raises `UserError` if the name is invalid, or the download
    fails.
    """
    repo = ALIASES.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UserError(f"{name} is not a file, a directory or a hub repository (owner/name)")
    path = download(repo, PATTERNS, revision=revision or PINNED.get(repo, "main"), ignore=SECOND_COPY)
    return path, path.name
