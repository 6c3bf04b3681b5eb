"""Download from the Hugging Face Hub, and upload exported models, with one-line errors."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError, one_line, short_repr

TIMEOUT = 3.0  # maximum number of seconds to wait for a connection to the hub
HINTS = {  # keyed by huggingface_hub exception name, subclasses first
    "GatedRepoError": "its owner requires consent: accept the terms on the hub, then log in (hf auth login)",
    "RevisionNotFoundError": "the revision does not exist: use a commit, tag or branch of the repository",
    "RepositoryNotFoundError": "the repository does not exist, or needs a login (hf auth login)",
    "OfflineModeIsEnabled": "not in the hub's cache, and offline mode is on: set HF_HUB_OFFLINE=0, or pass a directory",
    "LocalEntryNotFoundError": "not in the hub's cache, and the hub cannot be reached: pass a directory instead",
    "HFValidationError": "not a valid name on the hub: use OWNER/NAME",
}
UPLOAD_HINTS = {  # keyed by HTTP status
    401: "the token is not valid: run hf auth login, or change HF_TOKEN",
    403: "the token has no permission to write there: use a token with write access",
}


def download(
    repo: str, patterns: Sequence[str], *, revision: str = "main", kind: str = "model", ignore: Sequence[str] = ()
) -> Path:
    """Return the local directory of a repository at a revision; download it to the hub's cache if needed.

    Args:
        repo: name of the repository, `owner/name`.
        patterns: glob patterns of files to download, such as `*.json`. The directory may contain files from other downloads.
        revision: a commit, tag or branch.
        kind: type of the repository, `model` or `dataset`.
        ignore: glob patterns of files not to download.

    Raises:
        UserError: if the repository or revision does not exist or needs permission, or the download fails.
    """
    from huggingface_hub import constants, snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no log line for each retry of a download
    try:
        path = snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            allow_patterns=[*patterns],
            ignore_patterns=[*ignore],
            local_files_only=not reachable(),
        )
    except Exception as e:  # errors of the hub's client and of the network
        raise UserError(f"{repo} at {revision}: {_reason(e, constants.ENDPOINT)}") from None
    return Path(path)


def _reason(error: Exception, endpoint: str) -> str:
    """Explain an error of a download, with a fix if it is in `HINTS`."""
    classes = {each.__name__ for each in type(error).__mro__}
    status = _status(error.__cause__)
    if status is not None and "LocalEntryNotFoundError" in classes:
        return f"not in the hub's cache, and {endpoint} answers with HTTP status {status}"
    for name, hint in HINTS.items():
        if name in classes:
            return hint
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error of the hub's client, or None; only some of its errors have a response."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def check_upload(repo: str) -> None:
    """Raise `UserError` if `upload` would fail because of an invalid repository name or a missing login."""
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise UserError(f"{short_repr(repo)} is not a repository of the hub: use OWNER/NAME")
    if not get_token():
        raise UserError(f"cannot upload to {repo}: not logged in; run hf auth login, or set HF_TOKEN")


def upload(directory: Path, repo: str, private: bool = True, replaced: Sequence[str] = ()) -> str:
    """Upload the files of a directory as one commit, and return the address of the model; the directory is unchanged.

    The repository is created if it does not exist. The token comes from the hub's own login. The commit deletes the files in
    `replaced`, because programs may load files of an earlier model, such as weights in a single file, instead of the new files.

    Args:
        directory: an exported model.
        repo: name of the repository, `owner/name`.
        private: whether a new repository is private; an existing repository keeps its visibility.
        replaced: glob patterns of files to delete from the repository, except uploaded files.

    Raises:
        UserError: if the user is not logged in or lacks permission, or the hub cannot be reached or rejects the files.
    """
    from huggingface_hub import HfApi, constants

    check_upload(repo)
    retry = f"the files are in {directory}: run hf upload {repo} {directory}"
    if constants.is_offline_mode() or not reachable():
        raise UserError(f"cannot upload to {repo}: {constants.ENDPOINT} cannot be reached; {retry}")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    api = HfApi()
    try:
        created = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=directory, commit_message="Upload model", delete_patterns=[*replaced]
        )
    except Exception as e:  # errors of the hub's client and of the network
        reason = UPLOAD_HINTS.get(_status(e) or 0, f"{type(e).__name__}: {one_line(e, 200)}")
        raise UserError(f"cannot upload to {repo}: {reason}; {retry}") from None
    return str(created)


def reachable(timeout: float = TIMEOUT) -> bool:
    """Return whether the hub, or the proxy to it, accepts a connection within `timeout` seconds.

    Without this check, the hub's client would retry for half a minute. This function does not wait for an answer: the client
    does, as long as HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT allow. In offline mode, return True without a request,
    because the client then uses only its cache.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return True
    session = get_session()
    connected = threading.Event()
    ended = threading.Event()  # connected, or failed to connect

    def trace(event: str, _: Any) -> None:
        # The first event is omitted if the session reuses an open connection.
        if event.endswith(("connect_tcp.complete", "send_request_headers.complete")):
            connected.set()
            ended.set()

    def ask() -> None:
        try:
            session.head(constants.ENDPOINT, timeout=timeout, extensions={"trace": trace})
        except Exception:  # any error of the client's HTTP library
            return
        finally:
            ended.set()

    # Run in a thread, because DNS lookup has no timeout.
    threading.Thread(target=ask, daemon=True).start()
    ended.wait(timeout)
    return connected.is_set()
