"""Numbers of metrics: scalars, lists of layers, and the loads of experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.follow.tail import row_of
from jaxgpt.trainer.metrics import MetricsFile, read_metrics
from jaxgpt.trainer.step_metrics import numbers


def test_loads_are_summarized_for_each_layer() -> None:
    """Test equal loads, all tokens with the same two experts, and an expert without tokens."""
    load_LE = jnp.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]])
    found = numbers({"loss": jnp.float32(2.5), "expert_load": load_LE})
    assert found["loss"] == 2.5
    assert found["load_entropy"] == pytest.approx([1.0, 0.5, 1.5 * math.log(2) / math.log(4)])
    assert found["largest_share"] == [0.25, 0.5, 0.5]
    assert "expert_load" not in found


def test_one_expert_has_all_tokens() -> None:
    assert numbers({"expert_load": np.ones((2, 1))}) == {"load_entropy": [1.0, 1.0], "largest_share": [1.0, 1.0]}


@pytest.mark.parametrize("value", [1.5, [0.5, 0.25]])
def test_numbers_and_lists_are_written_and_read(value: Any) -> None:
    with MetricsFile(Path("metrics.jsonl")) as file:
        file.write(step=3, loss=2.0, mine=numbers({"mine": np.array(value)})["mine"])
        file.write(step=4, loss=2.0, mine=[1.0, math.nan])
    first, second = read_metrics(Path("metrics.jsonl"))
    assert first == {"step": 3, "loss": 2.0, "mine": value}
    assert "mine" not in second


def test_trackers_receive_the_numbers_of_a_list_one_by_one() -> None:
    row = row_of({"step": 2, "loss": 1.0, "load_entropy": [0.5, 0.75], "command": ["jaxgpt"]}, 0.0)
    assert row is not None
    assert row.values == {"loss": 1.0, "load_entropy/0": 0.5, "load_entropy/1": 0.75}
