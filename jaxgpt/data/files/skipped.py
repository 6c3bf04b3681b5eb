"""Records that cannot be used or may be wrong: raise an error, or count them for the description of the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxgpt.errors import UserError, plural, short_repr


class UnusableRecord(UserError):
    """The error for a record of a known shape that cannot be used; `reason` describes all records with this error."""

    reason = ""


def reason_of(error: UserError, otherwise: str) -> str:
    """Return the description of all records with an error; `otherwise`: the description if the error has no reason."""
    return error.reason if isinstance(error, UnusableRecord) else otherwise


@dataclass
class Tally:
    """The number of findings of one kind, and the place of the first."""

    number: int = 0
    first: str = ""

    def add(self, where: str) -> None:
        """Count a finding at a place."""
        self.first = self.first or where
        self.number += 1


class Skipped:
    """Counts of skipped records and of used records that may be wrong, with the first of each kind.

    Args:
        on_error: `skip`: records that cannot be used are counted; `fail`: they raise an error.
    """

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self._unused = dict[str, Tally]()  # skipped records, keyed by reason; `first` has the place and the error
        self._label_false = Tally()  # used conversations that may be rejected answers
        self._omitted = dict[str, Tally]()  # messages that the chat template omits, keyed by role
        self._unknown_roles = Tally()  # messages of unknown roles, which are not trained on

    def count_omitted(self, where: str, role: str) -> None:
        """Count a message that the chat template omits, in a conversation that is used."""
        self._omitted.setdefault(role, Tally()).add(where)

    def count_unknown_role(self, where: str, role: str) -> None:
        """Count a message of an unknown role in a conversation that is used: the message is not trained on."""
        self._unknown_roles.add(f"{short_repr(role)} in {where}")

    def count_label_false(self, where: str) -> None:
        """Count a used conversation with a label that may mark a rejected answer."""
        self._label_false.add(where)

    def skip(self, reason: str, where: str, error: str) -> None:
        """Count a record that cannot be used; raise `UserError` if `on_error` is fail.

        Args:
            reason: group of the record in the description, such as `that cannot be encoded`.
            where: place of the record.
            error: what is wrong, and after a semicolon how to fix it.
        """
        if self._on_error == "fail":
            raise UserError(f"{where}: {error}; to skip such records, use --data.on-error skip")
        problem, _, _ = error.partition(";")
        self._unused.setdefault(reason, Tally()).add(f"{where}: {problem}")

    @property
    def counts(self) -> dict[str, int]:
        """The number of skipped records, keyed by reason."""
        return {reason: tally.number for reason, tally in self._unused.items()}

    def __str__(self) -> str:
        """Return the counts, and the first record of each reason; "" if no record was skipped or may be wrong."""
        return "".join(f"; {note}" for note in self._notes())

    def _notes(self) -> Iterator[str]:
        """Yield a note for each kind of finding."""
        if self._unused:
            total = sum(self.counts.values())
            reasons = [f"{tally.number:,} {reason} (first: {tally.first})" for reason, tally in self._unused.items()]
            yield f"skipped {plural(total, 'record')}: {', '.join(reasons)}"
        if self._label_false.number:
            yield (
                f"warning: {plural(self._label_false.number, 'conversation')} with the label false or 0 (first: "
                f"{self._label_false.first}): remove these records if the label marks rejected answers, as in KTO data"
            )
        if self._omitted:
            roles = [f"{plural(tally.number, 'message')} of the role {role}" for role, tally in self._omitted.items()]
            earliest, *_ = self._omitted.values()
            yield (
                f"warning: the chat template omits {', '.join(roles)} (first: {earliest.first}): write their text into a "
                f"user's message, or use a different template"
            )
        if self._unknown_roles.number:
            yield (
                f"warning: {plural(self._unknown_roles.number, 'message')} of unknown roles are not trained on (first: "
                f"{self._unknown_roles.first}): rename the role to assistant if the model should write such messages"
            )
