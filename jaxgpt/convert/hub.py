"""Download a model from the Hugging Face hub: safetensors, JSON and the chat template only, of one revision."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from jaxgpt.config import UserError
from jaxgpt.data.hub import reachable
from jaxgpt.data.tokenizer import GPT2_REPO, GPT2_REVISION

PATTERNS: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
PATTERNS += (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "encoder.json",
    "vocab.bpe",
)
PINNED = {GPT2_REPO: GPT2_REVISION}
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


def fetch_model(name: str, revision: str = "") -> tuple[Path, str]:
    """Return the folder of a hub repository, from the hub's cache or downloaded into it.

    Args:
        name: `owner/name`, or the bare name of one of OpenAI's four GPT-2 models.
        revision: a commit, tag or branch; empty: the pinned commit where one is known, else main as it is now.

    Returns:
        The folder and its commit.

    Raises:
        UserError: no such repository or revision, no permission, or neither in the cache nor reachable.
    """
    repo = ALIASES.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UserError(f"{name} is neither a folder nor the name of a hub repository (owner/name)")
    from huggingface_hub import errors, snapshot_download

    wanted = revision or PINNED.get(repo, "main")
    offline = "set HF_HUB_OFFLINE=0, or give a folder"
    hints: tuple[tuple[type[Exception], str], ...] = (
        (errors.GatedRepoError, "its owner requires consent: accept the terms on the hub, then log in (hf auth login)"),
        (errors.RevisionNotFoundError, "there is no such revision"),
        (errors.RepositoryNotFoundError, "there is no such repository, or it needs a login (hf auth login)"),
        (errors.OfflineModeIsEnabled, f"not in the hub's cache, and the hub is in offline mode: {offline}"),
        (
            errors.LocalEntryNotFoundError,
            "not in the hub's cache, and the hub cannot be reached: give a folder instead",
        ),
        (errors.HFValidationError, "not a valid name on the hub"),
    )
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no line for each retry of a download
    try:
        cached_only = not reachable()
        folder = Path(
            snapshot_download(
                repo,
                revision=wanted,
                allow_patterns=list(PATTERNS),
                ignore_patterns=["consolidated*"],  # Mistral's second copy of the weights
                local_files_only=cached_only,
            )
        )
    except Exception as e:  # the hub's client raises its own errors and those of the network
        said = next((hint for kind, hint in hints if isinstance(e, kind)), "")
        reason = said or f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"{repo} at {wanted}: {reason}") from None
    return folder, folder.name
