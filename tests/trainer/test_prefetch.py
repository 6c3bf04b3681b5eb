"""Batches are prepared in a thread, one call ahead."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from helpers import TEXT, comparable, small_run

from jaxgpt.data import Batches, Tokens, open_data
from jaxgpt.errors import TrainingFailed
from jaxgpt.trainer import prefetch
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import train
from jaxgpt.trainer.prefetch import prefetched, wait_for
from jaxgpt.trainer.start import Start


def test_one_result_ahead_in_another_thread() -> None:
    started = [threading.Event() for _ in range(4)]

    def work(i: int) -> threading.Thread:
        started[i].set()
        return threading.current_thread()

    with prefetched(work, range(4)) as results:
        for i, result in results:
            thread = result.result()
            assert thread is not threading.current_thread()
            assert started[min(i + 1, 3)].wait(10), "the next call starts ahead of its use"
            assert not started[-1].is_set() or i >= 2, "no more than one ahead"
    assert not thread.is_alive()


def test_an_error_comes_with_its_own_result() -> None:
    with prefetched(lambda i: 1 // (2 - i), range(4)) as results:
        pairs = [(i, future.result()) for i, future in islice(results, 2)]
        assert pairs == [(0, 0), (1, 1)]
        _, failed = next(results)
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()

    def interrupted() -> None:
        with prefetched(lambda i: i, range(1000)) as results:
            next(results)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert threading.active_count() == before


def test_a_call_that_hangs_delays_neither_a_stop_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "LEAVING", 0.1)
    hangs = threading.Event()
    stopping = threading.Event()
    with prefetched(lambda _: hangs.wait(60), range(4)) as results:
        _, future = next(results)
        threading.Timer(0.1, stopping.set).start()
        wait_for(future, stopping.is_set)
        assert not future.done()
    hangs.set()


@pytest.mark.ci
def test_a_bad_id_stops_a_run_at_its_step() -> None:
    config = small_run(steps=8, eval_every=8)
    config = replace(config, data=replace(config.data, stride=config.model.block_size + 1))
    Path("text.txt").write_text(TEXT)
    data = open_data(config)
    config = config.with_model(vocab_size=data.tokenizer.vocab_size)
    ids = data.train.take(0, len(data.train))
    ids[Batches.of(config, data.train).at(5).starts_B[-1]] = 999
    data = replace(data, train=Tokens([ids], config.model.vocab_size))

    class Silent(Listener): ...

    with pytest.raises(TrainingFailed, match=r"id 999 is outside the vocabulary.*the checkpoint of step 5 is kept"):
        train(Start(config, "out", data=data), Silent())
    assert [line["step"] for line in comparable("out")] == list(range(5))
