"""Documents that `jaxgpt data prepare` does not write: count and describe unreadable documents, and find repeated documents."""

from __future__ import annotations

import re

from jaxgpt.data.prepared.index import Skips

MAX_ERRORS = 10  # maximum number of errors listed in the index
MAX_GROUPS = 200  # maximum number of groups of similar errors in the index
MAX_SHOWN = 10  # maximum number of groups in the summary
IDENTITY_BYTES = 16  # bytes of a SHA-256 that identify a document
VARYING = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")  # parts of an error that differ between documents
ORDER = {"rest": 0, "file": 1, "document": 2}  # order of lost parts in the summary


def no_skips() -> Skips:
    """Return the entry `skipped` of a new index."""
    return {"documents": 0, "files": 0, "first": [], "groups": []}


def count_skipped(skipped: Skips, message: str, file: str, lost: str) -> None:
    """Count an unreadable document, file or remainder of a file in the entry `skipped` of an index.

    Args:
        skipped: the entry, which is updated.
        message: error with the file and the line or row.
        file: path of the file.
        lost: `document`, `file` or `rest`, as in `document_piece.DocumentPiece`.
    """
    if lost == "document":
        skipped["documents"] += 1
    else:
        skipped["files"] += 1
    if len(skipped["first"]) < MAX_ERRORS:
        skipped["first"].append(message)

    kind = VARYING.sub("?", message.removeprefix(file))
    for group in skipped["groups"]:
        if (group["file"], group["lost"], group["kind"]) == (file, lost, kind):
            group["number"] += 1
            return
    if len(skipped["groups"]) < MAX_GROUPS:
        skipped["groups"].append({"file": file, "lost": lost, "kind": kind, "number": 1, "first": message})


def skipped_lines(skipped: Skips) -> list[str]:
    """Describe groups of errors: lost remainders of files, files, then documents, each with the largest group first."""
    groups = sorted(skipped["groups"], key=lambda group: (ORDER[group["lost"]], -group["number"]))
    lines = []
    for group in groups[:MAX_SHOWN]:
        line = group["first"]
        if group["number"] > 1:
            line = f"{group['number']:,} documents of {group['file']}; the first: {line}"
        lines.append(line)
    if len(groups) > MAX_SHOWN:
        lines.append(f"and {len(groups) - MAX_SHOWN:,} other errors, listed in index.json")
    return lines


class Repeats:
    """Documents seen so far, as 16 bytes each; needs about 100 bytes of memory per document."""

    def __init__(self) -> None:
        self._seen = set[bytes]()
        self._is_repeated = False  # whether the current document has the text of an earlier document

    def add(self, is_first: bool, identity: bytes) -> bool:
        """Add the next piece; return whether its document has the text of an earlier document.

        Args:
            is_first: whether a document begins with the piece.
            identity: SHA-256 of the complete document; empty: unknown, so the document is kept.
        """
        if is_first:
            key = identity[:IDENTITY_BYTES]
            self._is_repeated = key in self._seen
            if key:
                self._seen.add(key)
        return self._is_repeated
