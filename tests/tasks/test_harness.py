"""Tasks of lm-evaluation-harness: `jaxgpt eval --tasks` on local files, without a network, and tasks during training."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import TEXT, Result, jaxgpt, lm_of

from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError
from jaxgpt.lm import save
from jaxgpt.tasks.definitions import check_files
from jaxgpt.trainer.metrics import read_metrics

HEAD = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
TASKS = {
    "quiz": """task: quiz
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "pages": """task: pages
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: bits_per_byte
""",
    "sums": """task: sums
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
""",
}


def write_tasks(directory: Path) -> None:
    """Write three tasks on the same twelve questions."""
    rows = []
    for n in range(12):
        rows.append({"question": f"{n} plus {n} is", "choices": [str(2 * n), str(3 * n), str(n)], "answer": 0})
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (directory / f"{name}.yaml").write_text(text + HEAD.format(data=data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="tasks need lm-evaluation-harness: pip install 'jaxgpt[eval]'")
    directory = tmp_path_factory.mktemp("tasks")
    write_tasks(directory)
    lm = lm_of("llama", block_size=64, vocab_size=256)
    save(lm._replace(tokenizer=make_tokenizer("byte", "", 0, 256)), directory / "run")
    return directory


def error(result: Result) -> str:
    """Return the only line of a command that failed because of its input."""
    assert result.code == 2, result.err
    assert not result.out
    lines = [line for line in result.err.splitlines() if line.startswith("jaxgpt: ")]
    return lines[-1]


def evaluate(folder: Path, *args: str) -> Result:
    return jaxgpt("eval", str(folder / "run"), "--tasks-path", str(folder), *args)


def test_tasks_of_three_kinds_are_evaluated_and_kept(folder: Path) -> None:
    result = evaluate(folder, "--tasks", "quiz,pages,sums", "--limit", "5", "--json")
    assert result.code == 0
    assert not result.err.replace("\n", "") or "jaxgpt:" not in result.err
    found = {(each["task"], each["metric"]): each for each in result.json["tasks"]}
    assert set(found) == {("quiz", "acc"), ("quiz", "acc_norm"), ("pages", "bits_per_byte"), ("sums", "exact_match")}
    assert found["quiz", "acc"]["samples"] == 5
    assert found["quiz", "acc"]["of"] == 12
    assert 0 <= found["quiz", "acc"]["value"] <= 1
    assert found["quiz", "acc"]["stderr"] >= 0
    kept = json.loads((folder / "run" / "tasks.json").read_text())["results"]
    assert [each["value"] for each in kept] == [each["value"] for each in result.json["tasks"]]
    assert all(each["versions"]["lm_eval"] for each in kept)


def test_the_loss_of_a_text_is_the_bits_per_byte_of_its_task(folder: Path) -> None:
    """The model reads bytes: its loss in nats is the task's bits per byte."""
    import jaxgpt as package
    from jaxgpt.tasks.load import open_tasks
    from jaxgpt.tasks.requests import answer_texts, encode

    lm = package.load(folder / "run")
    [result] = open_tasks(["pages"], str(folder)).evaluate(lm)
    questions = [json.loads(line)["question"] for line in (folder / "questions.jsonl").read_text().splitlines()]
    log_p = sum(answer_texts(lm, [encode(lm, question) for question in questions]))
    assert result.value == pytest.approx(-log_p / sum(map(len, questions)) / 0.6931471805599453, rel=1e-6)


def test_a_yaml_file_is_a_task_and_examples_are_added(folder: Path) -> None:
    text = TASKS["quiz"] + HEAD.format(data=folder / "questions.jsonl") + "fewshot_split: test\n"
    (folder / "shots.yaml").write_text(text.replace("task: quiz", "task: shots"))
    args = ("--tasks", str(folder / "shots.yaml"), "--limit", "3", "--shots", "2", "--json")
    result = jaxgpt("eval", str(folder / "run"), *args)
    assert {each["shots"] for each in result.json["tasks"]} == {2}


@pytest.mark.long
def test_an_unknown_metric_raises_one_line(folder: Path, tmp_path: Path) -> None:
    text = TASKS["quiz"].replace("metric: acc\n", "metric: wisdom\n") + HEAD.format(data=folder / "questions.jsonl")
    (tmp_path / "bad.yaml").write_text(text.replace("task: quiz", "task: bad"))
    message = error(jaxgpt("eval", str(folder / "run"), "--tasks", str(tmp_path / "bad.yaml")))
    assert message.endswith("one of its metrics is unknown: correct its metric_list")


def test_a_task_is_defined_once(folder: Path, tmp_path: Path) -> None:
    """The harness would keep one of two definitions."""
    from jaxgpt.tasks.load import open_tasks

    again = tmp_path / "again.yaml"
    again.write_text((folder / "quiz.yaml").read_text())
    for names in ([str(folder / "quiz.yaml"), str(again)], ["quiz", str(again)]):
        with pytest.raises(UserError, match=r"the task quiz is defined twice, in .*quiz(\.yaml)? and .*again.yaml"):
            open_tasks(names, str(folder))

    (tmp_path / "more.yaml").write_text((folder / "quiz.yaml").read_text())
    with pytest.raises(UserError, match=r"the task quiz is defined twice, in .*again.yaml and .*more.yaml: rename one"):
        open_tasks(["quiz"], str(tmp_path))


@pytest.mark.parametrize("line", ["task: quiz/easy", '"task": quiz/easy', "task: 'quiz/easy' # twice"])
def test_every_spelling_of_a_definition_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.yaml").write_text("process_docs: !function programs.clean\ntask: quiz/easy\n")
    (tmp_path / "b.yaml").write_text(f"include: c.yaml\n{line}\n")
    with pytest.raises(UserError, match=r"the task quiz/easy is defined twice, in .*a.yaml and .*b.yaml: rename one"):
        check_files(tmp_path, ["quiz/easy"])


@pytest.mark.parametrize("text", ["group: quiz\ntask:\n  - quiz\n", "- task: quiz\n", "task: quiz\nbroken: [\n", ""])
def test_a_file_that_defines_no_task_is_no_second_definition(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text("task: quiz\n")
    (tmp_path / "b.yaml").write_text(text)
    check_files(tmp_path, ["quiz"])


def test_more_examples_than_samples_raise_one_line(folder: Path) -> None:
    text = TASKS["quiz"] + HEAD.format(data=folder / "questions.jsonl") + "fewshot_split: test\n"
    (folder / "many.yaml").write_text(text.replace("task: quiz", "task: many"))
    message = error(jaxgpt("eval", str(folder / "run"), "--tasks", str(folder / "many.yaml"), "--shots", "999"))
    assert message.endswith("a prompt has more examples than the task has samples: lower --shots")


def test_every_evaluation_has_the_same_examples(folder: Path) -> None:
    from jaxgpt import load
    from jaxgpt.tasks.load import open_tasks

    text = TASKS["quiz"] + HEAD.format(data=folder / "questions.jsonl") + "fewshot_split: test\n"
    (folder / "again.yaml").write_text(text.replace("task: quiz", "task: again"))
    tasks = open_tasks(["again"], str(folder), shots=2)
    lm = load(folder / "run")
    first, second = (tasks.details(lm, limit=3, samples=True)["samples"]["again"] for _ in range(2))
    assert [each["arguments"] for each in first] == [each["arguments"] for each in second]


def test_stored_weights_are_evaluated(folder: Path) -> None:
    result = evaluate(folder, "--tasks", "quiz", "--limit", "3", "--weights", "int8")
    assert "int8 weights" in result.out


def test_data_that_need_the_network_are_named_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.tasks.load.reachable", lambda: False)
    for name in ("far", "away"):
        text = TASKS["quiz"].replace("task: quiz", f"task: {name}")
        (folder / f"{name}.yaml").write_text(f"{text}dataset_path: nobody/{name}\ntest_split: test\n")
    before = (folder / "run" / "tasks.json").exists()
    message = error(evaluate(folder, "--tasks", "far,quiz,away"))
    assert "the Hugging Face Hub cannot be reached" in message
    assert "far (nobody/far), away (nobody/away)" in message
    assert (folder / "run" / "tasks.json").exists() == before


BAD = {
    "no_data": (TASKS["quiz"] + HEAD.format(data="nowhere.jsonl"), "FileNotFoundError: Unable to find"),
    "no_field": (TASKS["quiz"].replace("{{question}}", "{{riddle}}") + "DATA", "cannot"),
    "programs": (TASKS["sums"] + "unsafe_code: true\nDATA", "programs runs the programs that a model writes"),
    "long": (TASKS["sums"].replace("max_gen_toks: 6", "max_gen_toks: 64") + "DATA", "up to 64 tokens"),
    "beams": (TASKS["sums"].replace("  until", "  num_beams: 3\n  until") + "DATA", "the task sets num_beams 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_task_that_cannot_be_evaluated_raises_one_line(folder: Path, name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    text = text.replace("DATA", HEAD.format(data=folder / "questions.jsonl"))
    kind = "quiz" if "task: quiz" in text else "sums"
    (tmp_path / "bad.yaml").write_text(text.replace(f"task: {kind}", f"task: {name}"))
    save_before = (folder / "run" / "tasks.json").exists()
    result = jaxgpt("eval", str(folder / "run"), "--tasks", str(tmp_path / "bad.yaml"))
    assert message in error(result)
    assert (folder / "run" / "tasks.json").exists() == save_before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--limit", "3"], "--limit has no effect without --tasks: omit it"),
        (["--shots", "0"], "--shots has no effect without --tasks: omit it"),
        (["--tasks", "quiz", "--data.path", "a.txt"], "--data.path has no effect with --tasks: omit it"),
        (["--tasks", "a.yaml"], "the task file a.yaml does not exist"),
        (["--tasks", ","], "no task is named"),
        (["--tasks", "quiz", "--tasks-path", "nowhere"], "the directory of tasks nowhere does not exist"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_raise_one_line(folder: Path, args: list[str], message: str) -> None:
    assert message in error(jaxgpt("eval", str(folder / "run"), *args))


@pytest.mark.long
def test_an_unknown_task_suggests_a_similar_one(folder: Path) -> None:
    message = error(evaluate(folder, "--tasks", "quizz"))
    assert message.startswith("jaxgpt: unknown task quizz (did you mean quiz")


def test_without_the_harness_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(lm_of("gpt2"), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = error(jaxgpt("eval", str(tmp_path / "run"), "--tasks", "hellaswag"))
    assert message == "jaxgpt: tasks need lm-evaluation-harness, which is not installed: pip install 'jaxgpt[eval]'"
    assert not (tmp_path / "run" / "tasks.json").exists()


TRAIN = """train python-char --data.path text.txt --data.tokenizer byte --model.block-size 64 --model.n-layer 1
--model.n-embd 16 --model.n-head 2 --train.batch-size 4 --train.steps 4 --train.eval-every 1 --train.eval-windows 2
--train.sample-tokens 0 --out run
""".split()


@pytest.mark.ci
def test_training_evaluates_tasks_and_the_metrics_equal_eval(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    args = ["--tasks", "quiz,sums", "--tasks-path", str(folder), "--tasks-every", "2", "--tasks-limit", "4"]
    result = jaxgpt(*TRAIN, *args)
    assert result.code == 0, result.err
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "quiz/acc" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert all("val_loss" in line and "quiz/acc_norm_stderr" in line for line in lines)

    last = ["--checkpoint", "last", "--tasks", "quiz,sums", "--tasks-path", str(folder), "--limit", "4", "--json"]
    found = jaxgpt("eval", "run", *last).json["tasks"]
    for each in found:
        assert lines[-1][f"{each['task']}/{each['metric']}"] == pytest.approx(each["value"], abs=1e-9)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tasks", "quiz", "--tasks-every", "3", "--train.eval-every", "2"], "--tasks-every 3 is not a multiple of"),
        (["--tasks", "nope.yaml"], "the task file nope.yaml does not exist"),
        (["--tasks-limit", "3"], "--tasks-limit has no effect without --tasks: omit it"),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_trained_with_start_no_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: Sequence[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    assert message in error(jaxgpt(*TRAIN, *args))
    assert not (tmp_path / "run").exists()


def test_the_windows_of_long_texts_are_the_harness_own() -> None:
    pytest.importorskip("lm_eval", reason="compares with lm-evaluation-harness: pip install 'jaxgpt[eval]'")
    from hypothesis import given
    from hypothesis import strategies as st
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from jaxgpt.tasks.requests import windows

    @given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12))
    def check(ids: list[int], length: int) -> None:
        expected = [make_disjoint_window(pair) for pair in get_rolling_token_windows(ids, 99, length, 1)]
        assert [tuple(window) for window in windows(ids, 99, length)] == expected

    check()


@pytest.mark.parametrize("last", ["the end", "im", "d"])
def test_a_prompt_ends_with_the_content_of_the_last_message(last: str) -> None:
    """Not with a part of the text that ends the turn."""
    pytest.importorskip("lm_eval", reason="tasks need lm-evaluation-harness: pip install 'jaxgpt[eval]'")
    from jaxgpt.tasks.harness import TaskModel

    turn = "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    turn += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = make_tokenizer("byte", "", 0, 256)
    tokenizer.special = SpecialTokens({}, {"chat_template": turn})
    lm = lm_of("llama", block_size=64, vocab_size=256)._replace(tokenizer=tokenizer)
    prompt = TaskModel(lm).apply_chat_template([{"role": "user", "content": last}], add_generation_prompt=False)
    assert prompt == f"<|im_start|>user\n{last}"


def test_a_template_that_rewrites_the_last_message_raises_one_line() -> None:
    pytest.importorskip("lm_eval", reason="tasks need lm-evaluation-harness: pip install 'jaxgpt[eval]'")
    from jaxgpt.tasks.harness import TaskModel

    tokenizer = make_tokenizer("byte", "", 0, 256)
    tokenizer.special = SpecialTokens(
        {}, {"chat_template": "{% for each in messages %}{{ each.content | upper }}{% endfor %}"}
    )
    lm = lm_of("llama", block_size=64, vocab_size=256)._replace(tokenizer=tokenizer, source="runs/loud")
    messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "The sum is"}]
    with pytest.raises(UserError, match="the chat template of runs/loud rewrites the last message"):
        TaskModel(lm).apply_chat_template(messages, add_generation_prompt=False)


def test_an_earlier_text_is_not_the_last_message() -> None:
    """If the template drops the last message, an equal text before it does not end the prompt."""
    pytest.importorskip("lm_eval", reason="tasks need lm-evaluation-harness: pip install 'jaxgpt[eval]'")
    from jaxgpt.tasks.harness import TaskModel

    tokenizer = make_tokenizer("byte", "", 0, 256)
    tokenizer.special = SpecialTokens(
        {}, {"chat_template": "{% for each in messages[:1] %}{{ each.content }}{% endfor %}"}
    )
    lm = lm_of("llama", block_size=64, vocab_size=256)._replace(tokenizer=tokenizer)
    messages = [{"role": "user", "content": "yes or no?"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(UserError, match="rewrites the last message"):
        TaskModel(lm).apply_chat_template(messages, add_generation_prompt=False)
