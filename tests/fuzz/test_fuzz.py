"""Any file or command line gives a one-line error or a correct result, never a crash, a hang or a wrong number."""

from __future__ import annotations

from random import Random

import pytest
import targets
from inputs import MAKES


def fuzz(name: str, examples: int) -> None:
    accepted = 0
    for number in range(examples):
        rng = Random(number)
        data = rng.choice(MAKES[name])(rng)
        try:
            accepted += targets.outcome(getattr(targets, name), data)
        except Exception as e:
            pytest.fail(f"{name}, input {number}, {data[:300]!r}: {type(e).__name__}: {e}")
    print(f"{name}: {examples:,} inputs, {accepted:,} accepted, the others rejected in one line")
    assert accepted > 0


@pytest.mark.parametrize("name", MAKES)
def test_some_inputs(name: str) -> None:
    fuzz(name, 40)


@pytest.mark.long
@pytest.mark.parametrize("name", MAKES)
def test_ten_thousand_inputs(name: str) -> None:
    fuzz(name, 10_000)
