"""Unreadable documents and files in index.json: count them, and describe them in groups of similar errors."""

from __future__ import annotations

import re

from jaxgpt.data.prepared.document_piece import Unreadable
from jaxgpt.data.prepared.index import Skips

MAX_ERRORS = 10  # maximum number of errors listed in the index
MAX_GROUPS = 200  # maximum number of groups of similar errors in the index
MAX_SHOWN = 10  # maximum number of groups in the summary
VARYING = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")  # parts of an error that differ between documents
ORDER = {"rest": 0, "file": 1, "document": 2}  # order of lost parts in the summary


def no_skips() -> Skips:
    """Return the entry `skipped` of a new index."""
    return {"documents": 0, "files": 0, "first": [], "groups": []}


def count_skipped(skipped: Skips, unreadable: Unreadable) -> None:
    """Count an unreadable document, file or remainder of a file in the entry `skipped` of an index, which is updated."""
    message, file, lost = unreadable
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
