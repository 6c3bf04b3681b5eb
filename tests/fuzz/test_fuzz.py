"""Any file or command line gives a one-line error or a right result, never a crash, a hang or a wrong number."""

from __future__ import annotations

from pathlib import Path

import pytest
import targets
from hypothesis import HealthCheck, Phase, given, seed, settings
from inputs import MAKES, SHARDS, TENSORS
from mutations import inputs
from safetensors.numpy import save_file

FEW, MANY = 40, 10_000


def fuzz(name: str, examples: int) -> None:
    accepted = []

    @seed(0)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],  # a smaller seed is not a simpler input
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(inputs(*MAKES[name]))
    def check(data: bytes) -> None:
        accepted.append(targets.outcome(getattr(targets, name), data))

    Path("shards").mkdir()
    for file, names in SHARDS.items():
        save_file({tensor: TENSORS[tensor] for tensor in names}, Path("shards") / file)
    check()
    print(f"{name}: {len(accepted):,} inputs, {sum(accepted):,} accepted, the others refused in one line")
    assert len(accepted) >= examples
    assert sum(accepted) > 0, "some inputs must be accepted"


@pytest.mark.parametrize("name", MAKES)
def test_some_inputs(name: str) -> None:
    fuzz(name, FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", MAKES)
def test_ten_thousand_inputs(name: str) -> None:
    fuzz(name, MANY)
