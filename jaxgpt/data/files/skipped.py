"""Records that cannot be used or may be wrong: raise an error, or count them for the description of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxgpt.errors import UserError, plural


class UnusableRecord(UserError):
    """The error for a record of a known shape that cannot be used; `reason` describes all records with this error."""

    reason = ""


def reason_of(error: UserError, otherwise: str) -> str:
    """Return the description of all records with an error; `otherwise`: the description if the error has no reason."""
    return error.reason if isinstance(error, UnusableRecord) else otherwise


class RecordWarning(NamedTuple):
    """A kind of finding in records that are used but may be wrong.

    Attributes:
        describe: function that describes all findings, given the number of findings in each group.
        advice: how to change the records.
    """

    describe: Callable[[Mapping[str, int]], str]
    advice: str


@dataclass
class Tally:
    """The number of findings in one group, and a text about the first."""

    number: int = 0
    first: str = ""

    def add(self, finding: str) -> None:
        """Count a finding; `finding` is a text with its place."""
        self.first = self.first or finding
        self.number += 1


class Skipped:
    """Counts of skipped records and of used records that may be wrong, with the first of each kind.

    Args:
        on_error: `skip`: records that cannot be used are counted; `fail`: they raise an error.
    """

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self._unused = dict[str, Tally]()  # skipped records, keyed by reason
        self._warnings = dict[RecordWarning, dict[str, Tally]]()  # findings in used records, by kind, keyed by group

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

    def warn(self, kind: RecordWarning, where: str, group: str = "") -> None:
        """Count a finding in a record that is used.

        Args:
            kind: kind of the finding.
            where: place of the finding.
            group: group of the finding in the description of its kind, such as the role of a message.
        """
        groups = self._warnings.setdefault(kind, {})
        groups.setdefault(group, Tally()).add(where)

    @property
    def counts(self) -> dict[str, int]:
        """The number of skipped records, keyed by reason."""
        return _numbers(self._unused)

    def __str__(self) -> str:
        """Return the counts, and the first record of each reason; "" if no record was skipped or may be wrong."""
        return "".join(f"; {note}" for note in self._notes())

    def _notes(self) -> Iterator[str]:
        """Yield a note about the skipped records, and one for each kind of finding in used records."""
        if self._unused:
            total = sum(self.counts.values())
            reasons = [f"{tally.number:,} {reason} (first: {tally.first})" for reason, tally in self._unused.items()]
            yield f"skipped {plural(total, 'record')}: {', '.join(reasons)}"
        for kind, groups in self._warnings.items():
            earliest, *_ = groups.values()  # in the order in which they were found
            yield f"warning: {kind.describe(_numbers(groups))} (first: {earliest.first}): {kind.advice}"


def _numbers(tallies: Mapping[str, Tally]) -> dict[str, int]:
    """Return the number of findings in each group."""
    return {group: tally.number for group, tally in tallies.items()}
