"""Ambiguous JSON, endless files, and names and values with line breaks raise one-line errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.draw import draw_run
from jaxgpt.config import DataConfig
from jaxgpt.config_json import from_json
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes, read_json
from jaxgpt.strict_json import parse_json
from jaxgpt.trainer.metrics import read_metrics

JSON = {
    "key twice": (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
    "nan": (b'{"a": NaN}', "'NaN' is not finite"),
    "infinity": (b'{"a": -Infinity}', "'-Infinity' is not finite"),
    "large": (b'{"a": 1e400}', "'1e400' is not finite"),
    "long": (b'{"a": 1' + b"0" * 5000 + b"}", "is not finite"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "mark": (b"\xef\xbb\xbf{}", "BOM"),
    "bytes": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "half": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "cut": (b'{"a": ', "Expecting value"),
    "two": (b"{} {}", "Extra data"),
}


@pytest.mark.parametrize("case", JSON)
def test_ambiguous_json_raises(case: str) -> None:
    text, message = JSON[case]
    with pytest.raises(UserError, match=message) as error:
        parse_json(text, "config.json")
    assert str(error.value).startswith("config.json: not valid JSON (")
    assert len(str(error.value).splitlines()) == 1


def test_large_numbers_and_surrogate_pairs_are_accepted() -> None:
    value = {"a": [10**18 - 1, -(2**56), 1.7e308, "\U0001f600"]}
    assert parse_json(json.dumps(value), "x") == value
    [large] = parse_json(f"[{10**30}]", "x")
    assert isinstance(large, float)
    assert large == 1e30


def test_the_size_of_files_is_limited(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is not a file"):
        read_json(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as f:
        f.truncate(2**40)
    with pytest.raises(UserError, match=r"1,099,511,627,776 bytes, at most 16,777,216 are allowed"):
        read_bytes(tmp_path / "large")


def test_an_error_is_one_line_for_any_quoted_value() -> None:
    assert str(UserError("no file a\nb\r\x1b[31m\u2028\udc80: give another")) == (
        "no file a\\nb\\r\\x1b[31m\\u2028\\udc80: give another"
    )
    assert len(str(UserError("x" * 10**6))) < 1010


@pytest.mark.parametrize("value", ["a\0b", "\udcff"])
def test_invalid_paths(value: str) -> None:
    with pytest.raises(UserError, match=r"data\.path .* contains a NUL or an unpaired surrogate"):
        DataConfig(path=value)


def test_deeply_nested_values_are_shortened() -> None:
    with pytest.raises(UserError, match=r"model\.n_layer must be an integer") as error:
        from_json('{"model": {"n_layer": ' + "[" * 500 + "]" * 500 + "}}")
    assert len(str(error.value)) < 200


def test_metrics_of_wrong_types(tmp_path: Path) -> None:
    lines = [b'{"step": 1, "loss": 2.0}', b'{"step": true, "loss": 1.0}', b'{"step": -1}', b'{"step": 2, "loss": NaN}']
    lines += [
        b"[" * 5000,
        b"\xff\xfe",
        b'{"step": 3, "step": 4}',
        b"null",
        b'{"step": 5, "loss": "low", "val_loss": 3}',
        b'{"step": 5, "loss": 2.0, "changed": "x"}',
    ]
    lines += [b'{"step": 6, "loss": 1e400}', b'{"step": 99999999999999999999}', b'{"step": 7, "lo']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    draw_run(Run(tmp_path), "runs/$a^$b_")
    assert (tmp_path / "loss.png").stat().st_size > 1000
