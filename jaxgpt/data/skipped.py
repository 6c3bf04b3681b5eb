"""Records that cannot be used or may be wrong: raise an error, or count them for the description of the data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxgpt.errors import UserError, plural, short_repr


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
    """Counts of skipped records and of records that may be wrong; unless `on_error` is skip, an unusable record is an error."""

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self._unused = dict[str, Tally]()  # records, keyed by reason; `first` includes the error
        self._rejected = Tally()  # used conversations that may be rejected answers
        self._omitted = dict[str, Tally]()  # messages that the chat template omits, keyed by role
        self._unknown_roles = Tally()  # messages of unknown roles, which are not trained on

    def omitted(self, where: str, role: str) -> None:
        """Count a message that the chat template omits, in a conversation that is used."""
        self._omitted.setdefault(role, Tally()).add(where)

    def unknown_role(self, where: str, role: str) -> None:
        """Count a message of an unknown role in a conversation that is used: the message is not trained on."""
        self._unknown_roles.add(f"{short_repr(role)} in {where}")

    def may_be_rejected(self, where: str) -> None:
        """Count a used conversation with a label that may mark a rejected answer."""
        self._rejected.add(where)

    def add(self, reason: str, where: str, error: str) -> None:
        """Count a record; raise `UserError` if records are not skipped."""
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
        text = ""
        if self._unused:
            total = sum(tally.number for tally in self._unused.values())
            parts = [f"{tally.number:,} {reason} (first: {tally.first})" for reason, tally in self._unused.items()]
            text += f"; skipped {plural(total, 'record')}: {', '.join(parts)}"
        if self._rejected.number:
            text += (
                f"; warning: {plural(self._rejected.number, 'conversation')} with the label false (first: "
                f"{self._rejected.first}): remove these records if the label marks rejected answers, as in KTO data"
            )
        if self._omitted:
            counts = [f"{plural(tally.number, 'message')} of the role {role}" for role, tally in self._omitted.items()]
            earliest, *_ = self._omitted.values()
            text += (
                f"; warning: the chat template omits {', '.join(counts)} (first: {earliest.first}): write their text into a "
                f"user's message, or use a different template"
            )
        if self._unknown_roles.number:
            text += (
                f"; warning: {plural(self._unknown_roles.number, 'message')} of unknown roles are not trained on (first: "
                f"{self._unknown_roles.first}): rename the role to assistant if the model should write such messages"
            )
        return text
