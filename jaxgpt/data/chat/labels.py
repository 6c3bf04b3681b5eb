"""Labels in data for KTO: they mark the answer of a record as accepted (true) or rejected (false)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgpt.data.files.lenient_json import Twice
from jaxgpt.data.files.skipped import UnusableRecord
from jaxgpt.errors import UserError, short_repr

# TRL's field for a request and its answer. Next to messages, the same name is also common for the class of a conversation.
LABEL = "label"
KTO_TAG = "kto_tag"  # LLaMA-Factory's field, which always marks an answer
LABEL_FIELDS = (LABEL, KTO_TAG)


class RejectedAnswer(UnusableRecord):
    """The error for a record whose answer is labelled as rejected."""

    reason = "with a rejected answer"


def check_accepted(name: str, fields: Mapping[str, Any]) -> None:
    """Raise `RejectedAnswer` if a label marks the answer of a record as rejected.

    Args:
        name: a field of `LABEL_FIELDS`.
        fields: the fields of the record that are not null.

    Raises:
        RejectedAnswer: if the label is false.
        UserError: if the field is given twice, or `kto_tag` is neither true nor false.
    """
    if name not in fields:
        return
    label = fields[name]
    if isinstance(label, Twice):
        raise UserError(f"the {name} is given twice: remove one")

    is_accepted = _truth(label)
    if is_accepted is None and name == KTO_TAG:
        raise UserError(
            f"the {name} must be true (an accepted answer) or false (a rejected one), not {short_repr(label)}"
        )
    if is_accepted is False:
        raise RejectedAnswer(
            f"the {name} {short_repr(label)} marks a rejected answer, as in preference data: remove the record, or rename the "
            f"field if it has a different meaning"
        )


def is_label_false(fields: Mapping[str, Any]) -> bool:
    """Return whether the `label` of a record is false, 0, or one of these as text."""
    return _truth(fields.get(LABEL)) is False


def _truth(label: Any) -> bool | None:
    """Return a label as a truth value, which tables also store as a number or a text; None: it is neither true nor false."""
    if isinstance(label, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower())
    if isinstance(label, bool | int | float) and label in (0, 1):
        return bool(label)
    return None
