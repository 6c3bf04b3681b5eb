"""TensorBoard event files: bytes of TensorBoard's own writer, and its reader."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from event_files import read_events
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.follow.events import EventFile, crc32c, event, first_event, record, varint

# Written by tensorboard 2.21: RecordWriter and Event.SerializeToString, with the values of `test_the_bytes_equal_...`.
GOLDEN = (
    "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
    "2600000000000000734fe30009000000000000024010ac022a180a0b0a046c6f7373150000003f"
    "0a090a026c72156f12833a381ffa6b"
)


def test_the_bytes_equal_those_of_tensorboard() -> None:
    values = {"loss": 0.5, "lr": 1e-3}
    assert (record(first_event(1.5)) + record(event(300, values, 2.25))).hex() == GOLDEN


def test_the_checksum_equals_the_check_value_of_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value in catalogs of CRCs
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@given(st.integers(0, 2**63 - 1))
def test_a_varint_has_seven_bits_a_byte(number: int) -> None:
    encoded = varint(number)
    assert sum((byte & 127) << 7 * i for i, byte in enumerate(encoded)) == number
    assert [byte >> 7 for byte in encoded] == [1] * (len(encoded) - 1) + [0]


@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=9), st.floats(width=32, allow_nan=False), max_size=3)))
def test_an_independent_reader_finds_the_scalars(rows: list[dict[str, float]]) -> None:
    path = Path("events.out.tfevents.1")
    file = EventFile(path)
    for step, values in enumerate(rows):
        file.add(step, values, step / 2)
    file.close()
    assert read_events(path) == [(step, step / 2, values) for step, values in enumerate(rows)]


def test_records_after_the_kept_size_are_dropped() -> None:
    path = Path("events.out.tfevents.1")
    file = EventFile(path)
    file.add(0, {"a": 1.0}, 0.0)
    size = file.flush()
    file.add(1, {"a": 2.0}, 0.0)
    file.close()
    again = EventFile(path, size)
    again.add(1, {"a": 3.0}, 0.0)
    again.close()
    assert [values for _, _, values in read_events(path)] == [{"a": 1.0}, {"a": 3.0}]


def test_a_number_beyond_float32_is_infinite() -> None:
    assert event(0, {"a": -1e300}, 0.0).endswith(struct.pack("<f", float("-inf")))


@pytest.mark.long
def test_tensorboard_reads_the_file(tmp_path: Path) -> None:
    name = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(name, exc_type=ImportError)
    file = EventFile(tmp_path / "events.out.tfevents.1")
    for step in range(200):
        file.add(step, {"loss": 1 / (step + 1)}, 1e9 + step)
    file.close()
    accumulator = reader.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    accumulator.Reload()
    found = accumulator.Scalars("loss")
    assert [(each.step, each.wall_time) for each in found] == [(step, 1e9 + step) for step in range(200)]
    assert max(abs(each.value - 1 / (each.step + 1)) for each in found) < 1e-7
