"""Streamed weights: a checkpoint appears only if every weight was passed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxgpt.checkpoint.stream import stream_params

LIKE = {"wte": np.zeros((3, 2), np.float32), "h_0": {"kernel": np.zeros((2, 2), np.float32)}}
WTE = ("wte", np.ones((3, 2), np.float32))
KERNEL = ("h_0/kernel", np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([WTE], r"no values for the weights h_0/kernel: pass an array of each"),
        ([WTE, KERNEL, ("h_1/kernel", KERNEL[1])], r"the model has no weight h_1/kernel: omit it"),
        ([WTE, WTE, KERNEL], r"the weight wte occurs twice: pass it once"),
        ([WTE, ("h_0/kernel", np.ones((2, 3), np.float32))], r"h_0/kernel has the shape \[2, 3\], not \[2, 2\]"),
    ],
)
def test_other_weights_than_those_of_the_model_are_errors(
    arrays: list[tuple[str, np.ndarray]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        stream_params(tmp_path, LIKE, arrays, {})
    assert not (tmp_path / "0").exists()


def test_weights_in_any_order_are_a_checkpoint(tmp_path: Path) -> None:
    stream_params(tmp_path, LIKE, [KERNEL, WTE], {})
    assert (tmp_path / "0" / "checkpoint.json").is_file()
