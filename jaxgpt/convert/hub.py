"""Download a model from the Hugging Face hub: safetensors, JSON and the chat template of one revision."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from jaxgpt.data.hub import reachable
from jaxgpt.data.tokenizer_files import GPT2_REPO, GPT2_REVISION
from jaxgpt.errors import UserError

PATTERNS = (
    "config.json generation_config.json adapter_config.json *.safetensors *.safetensors.index.json tokenizer.json "
    "tokenizer_config.json chat_template.jinja"
).split()
PINNED = {GPT2_REPO: GPT2_REVISION}
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
HINTS = {  # by the names of huggingface_hub's exceptions, subclasses first
    "GatedRepoError": "its owner requires consent: accept the terms on the hub, then log in (hf auth login)",
    "RevisionNotFoundError": "there is no such revision",
    "RepositoryNotFoundError": "there is no such repository, or it needs a login (hf auth login)",
    "OfflineModeIsEnabled": "not in the hub's cache, and the hub is in offline mode: set HF_HUB_OFFLINE=0, or pass a directory",
    "LocalEntryNotFoundError": "not in the hub's cache, and the hub cannot be reached: pass a directory instead",
    "HFValidationError": "not a valid name on the hub",
}


def fetch_model(name: str, revision: str = "") -> tuple[Path, str]:
    """Return the directory of a hub repository, from the hub's cache or downloaded into it.

    Args:
        name: `owner/name`, or the bare name of one of OpenAI's four GPT-2 models.
        revision: a commit, tag or branch; empty: the pinned commit if there is one, otherwise main.

    Returns:
        The directory and its commit.

    Raises:
        UserError: if the repository or revision does not exist, needs permission, or is neither in the cache nor reachable.
    """
    repo = ALIASES.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UserError(f"{name} is no file, no directory, and not the name of a hub repository (owner/name)")
    from huggingface_hub import snapshot_download

    wanted = revision or PINNED.get(repo, "main")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no line for each retry of a download
    try:
        path = snapshot_download(
            repo,
            revision=wanted,
            allow_patterns=PATTERNS,
            ignore_patterns=["consolidated*"],  # Mistral's second copy of the weights
            local_files_only=not reachable(),
        )
    except Exception as e:  # the hub's client raises its own errors and the network's
        classes = {kind.__name__ for kind in type(e).__mro__}
        hint = next((hint for kind, hint in HINTS.items() if kind in classes), "")
        reason = hint or f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"{repo} at {wanted}: {reason}") from None
    return Path(path), Path(path).name
