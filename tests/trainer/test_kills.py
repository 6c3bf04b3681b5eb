"""kill -9 in a real run, at moments of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import campaign


@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.long)])
def test_killed_runs_end_like_one_that_was_not(tmp_path: Path, kills: int) -> None:
    tally = campaign(tmp_path, kills, seed=3)
    print(tally)
    assert tally.survived == tally.kills.total() == kills
    assert tally.identical == tally.runs
    assert tally.set_aside == 0, "what is there is valid, whenever the run is killed"
