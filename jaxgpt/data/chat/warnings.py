"""Warnings about conversations that are used but may be wrong."""

from __future__ import annotations

from collections.abc import Mapping

from jaxgpt.data.files.skipped import RecordWarning
from jaxgpt.errors import plural


def _false_labels(counts: Mapping[str, int]) -> str:
    return f"{plural(sum(counts.values()), 'conversation')} with the label false or 0"


def _omitted(counts: Mapping[str, int]) -> str:
    roles = [f"{plural(number, 'message')} of the role {role}" for role, number in counts.items()]
    return f"the chat template omits {', '.join(roles)}"


def _unknown_roles(counts: Mapping[str, int]) -> str:
    number = sum(counts.values())
    if number == 1:
        return "1 message of an unknown role is not trained on"
    return f"{number:,} messages of unknown roles are not trained on"


FALSE_LABEL = RecordWarning(
    describe=_false_labels,
    advice="remove these records if the label marks rejected answers, as in KTO data",
)
# A message that the chat template omits; the group of the finding is the role of the message.
OMITTED_MESSAGE = RecordWarning(
    describe=_omitted,
    advice="write their text into a user's message, or use a different template",
)
UNKNOWN_ROLE = RecordWarning(
    describe=_unknown_roles,
    advice="rename the role to assistant if the model should write such messages",
)
