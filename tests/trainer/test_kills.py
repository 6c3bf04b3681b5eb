"""kill -9 of real runs at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import campaign


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.ci), pytest.param(100, marks=pytest.mark.long)])
def test_killed_runs_end_like_an_uninterrupted_run(tmp_path: Path, kills: int) -> None:
    tally = campaign(tmp_path, kills, seed=3)
    print(tally)
    assert tally.survived == tally.kills.total() == kills
    assert tally.identical == tally.runs
    assert tally.set_aside == 0, "checkpoints on disk are valid whenever the run is killed"
