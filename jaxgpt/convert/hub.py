"""A name on the Hugging Face hub to a folder on this machine: safetensors and JSON only, of one pinned revision."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from jaxgpt.config import UserError
from jaxgpt.data.tokenizer import GPT2_REPO, GPT2_REVISION

PATTERNS: tuple[str, ...] = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
PATTERNS += ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe")
PINNED = {GPT2_REPO: GPT2_REVISION}
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


def fetch_model(name: str, revision: str = "") -> tuple[Path, str]:
    """The folder of a hub repository, from the hub's cache or downloaded into it.

    Args:
        name: `owner/name`, or one of OpenAI's four GPT-2 without an owner.
        revision: a commit, tag or branch; empty: the pinned commit where one is known, else main as it is now.

    Returns:
        The folder, and the commit that it is of.

    Raises:
        UserError: no such repository or revision, not allowed, or offline and not in the cache.
    """
    repo = ALIASES.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UserError(f"{name} is neither a folder nor a name on the hub (owner/name)")
    from huggingface_hub import errors, snapshot_download

    wanted = revision or PINNED.get(repo, "main")
    offline = "set HF_HUB_OFFLINE=0, or give a folder of your own"
    hints: tuple[tuple[type[Exception], str], ...] = (
        (errors.GatedRepoError, "its owner asks for consent: accept it on the hub, then log in (hf auth login)"),
        (errors.RevisionNotFoundError, "there is no such revision"),
        (errors.RepositoryNotFoundError, "there is no such repository, or it needs a login (hf auth login)"),
        (errors.OfflineModeIsEnabled, f"the hub is in offline mode and it is not in the cache: {offline}"),
        (errors.LocalEntryNotFoundError, "it is not in the cache and the hub cannot be reached: give a folder instead"),
        (errors.HFValidationError, "not a valid name on the hub"),
    )
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # not a line for each time it tries again
    try:
        folder = Path(snapshot_download(repo, revision=wanted, allow_patterns=list(PATTERNS)))
    except Exception as e:  # the hub's client raises its own errors and those of the network
        said = next((hint for kind, hint in hints if isinstance(e, kind)), "")
        reason = said or f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"{repo} at {wanted}: {reason}") from None
    return folder, folder.name
