"""Find out whether the Hugging Face hub can be reached, before its client retries for half a minute."""

from __future__ import annotations

import threading

TIMEOUT = 3.0  # seconds


def reachable(timeout: float = TIMEOUT) -> bool:
    """Return whether the hub answers. True in offline mode, without a request: the client rejects downloads."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return True
    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=timeout)
            answered.set()
        except Exception:  # any error of the client's HTTP library
            return

    # Run in a thread, because DNS lookup has no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout)
    return answered.is_set()
