"""Rewards: built-in functions, functions of users, and what goes wrong in them."""

from __future__ import annotations

import json
import math
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from jaxgpt.checkpoint.info import Info, seal
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, DataConfig, PostConfig
from jaxgpt.data.prompts import Prompt
from jaxgpt.directories import SAMPLES
from jaxgpt.errors import UserError
from jaxgpt.lm.results import Generation
from jaxgpt.post.answers import reward_answers
from jaxgpt.post.held_out_reward import RewardResult
from jaxgpt.post.reward_calls import Answered, rewards_of
from jaxgpt.post.reward_names import last_number, open_reward
from jaxgpt.post.rewards import WeightedSum, metrics_of, open_rewards, overlong_penalty
from jaxgpt.post.rollout_batch import rollout_batch
from jaxgpt.post.sample_file import SampleFile
from jaxgpt.post.start import named_reward


def one(name: str, text: str, **record: Any) -> float:
    return float(rewards_of(open_reward(name), name, Answered(["?"], [text], [record]), 60.0).total_B[0])


@pytest.mark.parametrize(
    ("name", "text", "record", "expected"),
    [
        ("exact", " 4\n", {"answer": "4"}, 1.0),
        ("exact", "44", {"answer": "4"}, 0.0),
        ("exact:target", "4", {"target": 4}, 1.0),
        ("exact", "4", {"answer": 4.0}, 1.0),
        ("exact", "4.0", {"answer": 4.0}, 1.0),
        ("exact", "4", {"answer": 4.5}, 0.0),
        ("number", "2 + 2 is 4.", {"answer": "#### 4"}, 1.0),
        ("number", "it is 1,234.50", {"answer": 1234.5}, 1.0),
        ("number", "-3", {"answer": "3"}, 0.0),
        ("number", "no number", {"answer": "3"}, 0.0),
        ("number", "it is \u22123", {"answer": "-3"}, 1.0),
        ("number", "it is 3", {"answer": "\u22123"}, 0.0),
        ("regex:^[ab]+$", "abba", {}, 1.0),
        ("regex:^[ab]+$", "abc", {}, 0.0),
        ("json", '{"a": [1]}', {}, 1.0),
        ("json", '{"a": [1}', {}, 0.0),
        ("json", '{"a": NaN}', {}, 0.0),
    ],
)
def test_built_in_rewards(name: str, text: str, record: dict[str, Any], expected: float) -> None:
    assert one(name, text, **record) == expected


@pytest.mark.parametrize("name", ["exact", "number"])
@pytest.mark.parametrize("answer", [True, ["4", "four"], {"value": 4}, None, math.nan])
def test_answers_that_are_no_text_or_number(answer: Any, name: str) -> None:
    """No text would ever equal them."""
    with pytest.raises(UserError, match=r"the field 'answer' with the expected answer must be a text or a number: "):
        one(name, str(answer), answer=answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1 2 3.", 3),
        ("1e3", 1000),
        (".5", 0.5),
        ("", None),
        ("-7,000 m", -7000),
        ("the set is {1,2,3}", 3),
        ("12,34", 34),
        ("1,234,567.50", 1234567.5),
        ("10-7", 7),
        ("(4)-2", 2),
        ("x = -2", -2),
        ("covid-19", 19),
        ("2024-11-28", 28),
        ("pages 3\u20135", 5),
        ("version 3.14.15", 15),
        (r"\boxed{10,\!000}", 10000),
        ("$1{,}234{,}567.5$", 1234567.5),
        (r"12\,000", 12000),
        ("12\u202f000", 12000),
        (r"(1\,2\,3)", 3),
    ],
)
def test_last_numbers(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numbers_are_exact() -> None:
    assert one("number", "9007199254740993", answer="9007199254740992") == 0
    assert one("number", "1e400", answer="1e500") == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "exat",
            "post.reward 'exat' is unknown (did you mean exact?): use exact[:FIELD], number[:FIELD], regex:PATTERN or",
        ),
        ("regex:(", "is not a regular expression"),
        ("missing.py:reward", "post.reward: missing.py does not exist"),
        ("my.py", "post.reward my.py names no function: use my.py:FUNCTION"),
    ],
)
def test_unknown_rewards(name: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        open_reward(name)
    assert said in str(error.value)


CODE = {
    "raises": ("raise RuntimeError('a\\nb')", "the reward my.py:f failed: RuntimeError: a b"),
    "sleeps": ("import time; time.sleep(9)", "takes more than 0.2 seconds for 2 answers"),
    "exits": ("raise SystemExit('no service')", "the reward my.py:f failed: SystemExit: no service"),
    "nan": ("return [1, float('nan')]", "returned nan for the answer 'y': return a finite number"),
    "few": ("return [1]", "returned 1 numbers for 2 answers"),
    "words": ("return ['a', 'b']", "must return a number per answer, not ['a', 'b']"),
    "text": ("return '12'", "must return a number per answer, not '12'"),
    "keys": ("return {0.5: 'x', 1.0: 'y'}", "must return a number per answer, not {0.5: 'x', 1.0: 'y'}"),
    "set": ("return {0.0, 1.0}", "must return a number per answer, not {0.0, 1.0}"),
    "huge": ("return [1e39, 0]", "returned 1e+39 for the answer 'x': return a number of magnitude 1e30 or less"),
    "none": ("return None", "must return a number per answer, not None"),
}


@pytest.mark.parametrize("case", CODE)
def test_a_reward_that_fails(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = CODE[case]
    Path("my.py").write_text(f"def f(prompts, texts, records):\n    {code}\n")
    reward = open_reward("my.py:f")
    with pytest.raises(UserError) as error:
        rewards_of(reward, "my.py:f", Answered(["p", "p"], ["x", "y"], [{}, {}]), 0.2)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_regular_expression_that_backtracks_forever() -> None:
    """It keeps the interpreter's lock, so a wait for a thread does not end either."""
    reward = open_reward(r"regex:^(\w+\s?)*$")
    text = "the answer is a long sentence of words and more!"
    with pytest.raises(UserError, match=r"the reward slow takes more than 0.2 seconds for 1 answers"):
        rewards_of(reward, "slow", Answered(["p"], [text], [{}]), 0.2)


def test_a_reward_that_ignores_all_errors_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(
        "import time\ndef f(prompts, texts, records):\n    try:\n        time.sleep(9)\n    except:\n        time.sleep(9)\n"
    )
    with pytest.raises(UserError, match=r"takes more than 0.1 seconds"):
        rewards_of(open_reward("my.py:f"), "my.py:f", Answered(["p"], ["x"], [{}]), 0.1)


def test_a_reward_that_changes_its_records_changes_no_other_call() -> None:
    record: dict[str, Any] = {"answer": "4", "seen": []}

    def reward(prompts: object, texts: object, records: list[dict[str, Any]]) -> list[float]:
        records[0].pop("answer")
        records[0]["seen"].append(1)
        return [1.0]

    rewards_of(reward, "my.py:f", Answered([[{"role": "user", "content": "2 + 2?"}]], ["4"], [record]), 60.0)
    assert record == {"answer": "4", "seen": []}


def test_the_limit_of_a_reward_in_another_thread() -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(UserError, match=r"takes more than 0.2 seconds"):
        pool.submit(rewards_of, lambda *_: Event().wait(5), "slow", Answered(["p"], ["x"], [{}]), 0.2).result()


def test_a_reward_may_use_alarms_of_its_own() -> None:
    """Libraries that check mathematics limit their time with SIGALRM, which only the main thread can handle."""

    def reward(prompts: object, texts: list[str], records: object) -> list[float]:
        previous = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(5)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        return [1.0] * len(texts)

    assert rewards_of(reward, "own", Answered(["p"], ["x"], [{}]), 60.0).total_B.tolist() == [1.0]
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_code_runs_only_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config.json of a run may come from anywhere."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("from pathlib import Path\nPath('ran').touch()\ndef f(p, t, r): return [1.0] * len(t)\n")
    notes: list[str] = []
    post = PostConfig(objective="grpo", reward=("my.py:f",))
    with pytest.raises(UserError, match=r"which is Python code: to run it, add --post.reward my.py:f"):
        named_reward(post, (), notes.append)
    assert not Path("ran").exists()
    assert list(named_reward(post, ("my.py:f",), notes.append)([], ["a"], [])) == [1.0]
    assert notes == ["running my.py:f, your own code, as the reward"]
    with pytest.raises(UserError, match=r"my.py has no function g"):
        open_reward("my.py:g")
    Path("bad.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"bad.py raises ZeroDivisionError: division by zero"):
        open_reward("bad.py:f")
    Path("ends.py").write_text("raise SystemExit('no service')\n")
    with pytest.raises(UserError, match=r"ends.py raises SystemExit: no service"):
        open_reward("ends.py:f")
    post = PostConfig(objective="grpo", reward=("nowhere.py:f",))
    with pytest.raises(UserError, match=r"nowhere.py does not exist"):
        named_reward(post, post.reward, notes.append)
    assert len(notes) == 1, "nothing runs"


def test_a_weighted_sum_of_rewards_is_a_reward() -> None:
    """It may be a term of another sum, and each term is a metric without its weight."""
    weights = {"exact": 1.0, "json": -0.5, "regex:=1$": 0.25}
    reward = open_rewards(weights)
    texts = ["4", "x=1", "{", "y"]
    records = [{"answer": "4"}, {"answer": "x=1"}, {"answer": "4"}, {"answer": "y"}]
    sums = [1 - 0.5, 1 + 0.25, 0, 1]
    assert reward(texts, texts, records) == sums

    found = rewards_of(reward, "", Answered(texts, texts, records), 60.0)
    assert list(found.metrics) == metrics_of(weights) == ["reward", "reward_exact", "reward_json", "reward_regex:=1$"]
    assert [value_B.tolist() for value_B in found.metrics.values()] == [sums, [1, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]

    nested = WeightedSum({"sum": reward, "json": open_reward("json")}, {"sum": 2.0, "json": 1.0})
    assert nested(texts, texts, records) == [2.0, 2.5, 0, 2]


def test_an_error_names_the_reward_of_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("def f(prompts, texts, records):\n    return [float('nan')]\n")
    reward = open_rewards({"json": 1.0, "my.py:f": 2.0})
    with pytest.raises(UserError, match=r"the reward my.py:f returned nan for the answer 'y': return a finite number"):
        rewards_of(reward, "", Answered(["p"], ["y"], [{}]), 60.0)
    Path("a").mkdir()
    Path("a/my.py").write_text(Path("my.py").read_text())
    with pytest.raises(UserError, match=r"my.py:f and a/my.py:f have the same metric, reward_my.py:f: rename"):
        open_rewards({"my.py:f": 1.0, "a/my.py:f": 2.0})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("exact", "json=1"),
            "several rewards need NAME=WEIGHT each, with a weight from -1e6 to 1e6, as in exact=1 json=0.2",
        ),
        (("exact=nan", "json=1"), "several rewards need NAME=WEIGHT each"),
        (("=1", "json=1"), "several rewards need NAME=WEIGHT each"),
        (("json=1", "json=2"), "post.reward lists json twice: add up its weights"),
        (("json=0", "exact=0"), "all weights of post.reward are 0"),
    ],
)
def test_weights_that_are_wrong(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as error:
        PostConfig(objective="grpo", reward=words)
    assert said in str(error.value)


def test_a_single_reward_is_a_name_without_a_weight() -> None:
    """A pattern may end in `=1`."""
    assert PostConfig(objective="grpo", reward=("regex:a=1",)).reward_weights == {"regex:a=1": 1.0}
    several = PostConfig(objective="grpo", reward=("regex:a=1=2", "json=-.5"))
    assert several.reward_weights == {"regex:a=1": 2.0, "json": -0.5}
    with pytest.raises(UserError, match=r"post.reward 'exact=1' is unknown.*; a single reward has no weight"):
        open_reward("exact=1")


def test_the_penalty_for_long_answers() -> None:
    """The penalty is 0 up to 12 of 16 tokens, then linear to -1."""
    assert overlong_penalty([1, 12, 13, 15, 16], 16, 4).tolist() == [0, 0, -0.25, -0.75, -1]
    assert overlong_penalty([1, 2], 2, 2).tolist() == [-0.5, -1]


def test_truncated_answers() -> None:
    """The reward includes the penalty, and answers without an end are not counted."""
    post = PostConfig(objective="grpo", reward=("json",), max_new_tokens=4, overlong_tokens=2, mask_truncated=True)
    config = Config(post=post, data=DataConfig(window=8))
    prompts = [Prompt([1, 2], "?", {})] * 3
    ended = [
        Generation("1", [5], "stop", log_p=[-1, -1], stop_id=0),
        Generation("12", [5, 6], "stop", log_p=[-1] * 3, stop_id=0),
    ]
    answers = [*ended, Generation("1234", [5, 6, 7, 8], "length", log_p=[-1] * 4)]
    found = reward_answers(open_reward("json"), config, prompts, answers)
    assert found.parts["reward_overlong"].tolist() == [0, -0.5, -1]
    assert found.total_B.tolist() == [1, 0.5, 0]
    batch = rollout_batch(config, prompts, answers, np.zeros(3), found.metrics)
    assert batch["metrics"]["truncated"].tolist() == [0, 0, 1]
    assert batch["counted"].tolist() == [1, 1, 0]
    assert (batch["windows"][..., 1] >= 0).sum(-1).tolist() == [2, 3, 4]


def write_checkpoint(run: Path, step: int, val_loss: float | None) -> None:
    """Write the record of a checkpoint without weights."""
    path = run / "checkpoints" / str(step)
    path.mkdir(parents=True)
    seal(path, Info(step, val_loss))


def test_samples_of_a_killed_run_are_resumed(tmp_path: Path) -> None:
    """A kill may leave an incomplete line; evaluations after the checkpoint are repeated."""
    path = tmp_path / SAMPLES
    path.write_text('{"step": 2, "answer": "a"}\n{"step": 4, "answer": "b"}\n{"step": 4, "ans')
    write_checkpoint(tmp_path, step=2, val_loss=1.0)
    SampleFile().started(None, None, Run(tmp_path), 2)  # type: ignore[arg-type]
    assert path.read_text() == '{"step": 2, "answer": "a"}\n'


def test_samples_of_an_evaluation_that_the_checkpoint_does_not_record_are_replaced(tmp_path: Path) -> None:
    """A run killed between its evaluation and the record of the result repeats the evaluation when it is resumed."""
    path = tmp_path / SAMPLES
    path.write_text('{"step": 2, "answer": "a"}\n{"step": 4, "answer": "b"}\n')
    write_checkpoint(tmp_path, step=4, val_loss=None)
    SampleFile().started(None, None, Run(tmp_path), 4)  # type: ignore[arg-type]
    assert path.read_text() == '{"step": 2, "answer": "a"}\n'


def test_samples_of_prompts_with_values_that_json_lacks(tmp_path: Path) -> None:
    """The messages of Parquet files may have times; an error would end the run at its first evaluation."""
    listener = SampleFile()
    listener.started(None, None, Run(tmp_path), 0)  # type: ignore[arg-type]
    prompt = [{"role": "user", "content": "2 + 2?", "at": datetime(2024, 5, 1)}]
    listener.evaluated(3, RewardResult(1.0, 0.0, np.ones(1, np.float32), ["4"], [prompt], 1.0))
    [line] = (tmp_path / SAMPLES).read_text().splitlines()
    written = json.loads(line)
    assert (written["answer"], written["prompt"][0]["content"]) == ("4", "2 + 2?")
