"""Tasks equal lm-evaluation-harness' own model `hf` on an export: every choice, text and answer."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TEXT, lm_of
from pieces import lm_of_pieces

REASON = "compares with lm-evaluation-harness' model hf: pip install 'jaxgpt[eval,parity]' accelerate"
for package in ("torch", "transformers", "accelerate", "lm_eval"):
    pytest.importorskip(package, reason=REASON)

import jaxgpt  # noqa: E402
from jaxgpt.convert.export_model import export_model  # noqa: E402
from jaxgpt.data.tokenizers.bpe import train_bpe  # noqa: E402
from jaxgpt.data.tokenizers.special import SpecialTokens  # noqa: E402
from jaxgpt.lm import LM, save  # noqa: E402
from jaxgpt.tasks.load import open_tasks  # noqa: E402
from jaxgpt.tasks.loaded import BOOTSTRAPS  # noqa: E402
from jaxgpt.tasks.quiet import FEWSHOT_SEED, quiet  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HEAD = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\nfewshot_split: test\n"
CHOICES = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXTS = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
ANSWERS = """output_type: generate_until
doc_to_text: "So {{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", ","], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, its export, and tasks on random pieces of text: short and long ones, some without a context."""
    directory = tmp_path_factory.mktemp("tasks")
    lines = [line for line in TEXT.splitlines() if line]
    draw = random.Random(0)
    rows = []
    for n in range(24):
        line = draw.choice(lines)
        cut = draw.randint(8, len(line) - 1) if n else 0
        choices = [line[cut:], draw.choice(lines)[:9], " 7", " 8"]
        rows.append({"question": line[:cut], "choices": choices, "answer": 0, "text": TEXT[: 40 + 90 * (n % 6)]})
    # Longer than the context, so that the beginning is dropped.
    rows.append({"question": TEXT[:900], "choices": [" 1", " and 2"], "answer": 0, "text": lines[0]})
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = HEAD.format(data=directory / "data.jsonl")
    for name, text in (("choices", CHOICES), ("texts", TEXTS), ("answers", ANSWERS)):
        (directory / f"{name}.yaml").write_text(f"task: {name}\n{text}{head}")

    tokenizer = train_bpe([[TEXT]], 300)
    eos = tokenizer.eos_id
    assert eos is not None
    names = {"eos_token": tokenizer.decode([eos]), "chat_template": TEMPLATE}
    tokenizer.special = SpecialTokens({"eos_token_id": eos}, names)
    lm = lm_of("llama", block_size=64, vocab_size=tokenizer.vocab_size, n_embd=32, head_dim=8)
    save(lm._replace(tokenizer=tokenizer), directory / "run")
    export_model(directory / "run", directory / "hf")
    return directory


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder / "hf"), device="cpu", dtype="float32", batch_size=8)


@pytest.fixture(scope="module")
def lm(folder: Path) -> LM:
    return jaxgpt.load(folder / "run")


def both(folder: Path, hf: Any, lm: LM, task: str, **options: Any) -> list[tuple[Any, Any]]:
    """Return the answers of both models to each request of a task, after checking that prompts and metrics are equal."""
    from lm_eval.evaluator import evaluate

    tasks = open_tasks([task], str(folder), options.pop("shots", None))
    ours = tasks.details(lm, samples=True, **options)
    chat = options.get("chat_template", False)
    for each in tasks.loaded["tasks"].values():
        each.set_fewshot_seed(seed=FEWSHOT_SEED)
    with quiet():
        theirs = evaluate(
            hf, tasks.loaded, bootstrap_iters=BOOTSTRAPS, apply_chat_template=chat, fewshot_as_multiturn=chat
        )
    for name, value in theirs["results"][task].items():
        is_number = "," in name and not isinstance(value, str)  # the error of some metrics is "N/A"
        assert ours["results"][task][name] == (pytest.approx(value, rel=1e-5) if is_number else value)
    pairs = []
    for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
        assert mine["arguments"] == other["arguments"]
        pairs += [(a[0], b[0]) for a, b in zip(mine["resps"], other["resps"], strict=True)]
    return pairs


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"shots": 2}, {"shots": 1, "chat_template": True}], ids=str)
def test_choices_have_the_same_log_probability(folder: Path, hf: Any, lm: LM, options: dict[str, Any]) -> None:
    pairs = both(folder, hf, lm, "choices", **options)
    assert len(pairs) == 98
    np.testing.assert_allclose([a for (a, _), _ in pairs], [b for _, (b, _) in pairs], atol=2e-4)
    assert [best for (_, best), _ in pairs] == [bool(best) for _, (_, best) in pairs]


def in_float64(export: Path) -> Any:
    """Return `hf` in float64, including the two modules that compute in float32 in any model."""
    import torch
    from lm_eval.models.huggingface import HFLM

    def norm(module: Any, x: Any) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)

    def rotation(module: Any, x: Any, position_ids: Any) -> Any:
        angle = position_ids[..., None].double() * module.inv_freq.double()
        both_halves = torch.cat([angle, angle], -1)
        return both_halves.cos(), both_halves.sin()

    hf = HFLM(pretrained=str(export), device="cpu", dtype="float64", batch_size=8)
    for module in hf.model.modules():
        for name, function in (("RMSNorm", norm), ("RotaryEmbedding", rotation)):
            if type(module).__name__.endswith(name):
                module.forward = partial(function, module)
    return hf


@pytest.mark.ci
def test_log_probabilities_are_as_exact_as_those_of_hf(folder: Path, hf: Any, lm: LM) -> None:
    """Both have the rounding errors of float32 products, summed in a different order: less than twice the errors of `hf`.

    Measured on a larger model with large random weights, the errors are 1.5 times as large, and with SmolLM2 a third.
    """
    pairs = both(folder, hf, lm, "choices")
    exact = np.array([b for _, (b, _) in both(folder, in_float64(folder / "hf"), lm, "choices")])
    our_errors = np.array([a for (a, _), _ in pairs]) - exact
    hf_errors = np.array([b for _, (b, _) in pairs]) - exact
    assert 0 < np.square(our_errors).mean() < 4 * np.square(hf_errors).mean()


@pytest.mark.ci
def test_complete_texts_have_the_same_log_probability(folder: Path, hf: Any, lm: LM) -> None:
    """The sums are over several windows of up to 64 tokens, each with an error of up to 2e-4 nats."""
    pairs = both(folder, hf, lm, "texts")
    np.testing.assert_allclose([a for a, _ in pairs], [b for _, b in pairs], atol=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"shots": 1, "chat_template": True}], ids=str)
def test_answers_are_the_same(folder: Path, hf: Any, lm: LM, options: dict[str, Any]) -> None:
    pairs = both(folder, hf, lm, "answers", **options)
    assert [a for a, _ in pairs] == [b for _, b in pairs]


@pytest.mark.ci
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_messages_are_rendered_alike(hf: Any, lm: LM, add_generation_prompt: bool) -> None:
    from jaxgpt.tasks.harness import TaskModel

    messages = [{"role": "user", "content": "1 plus 1 is"}, {"role": "assistant", "content": "2 "}]
    expected = hf.apply_chat_template(messages, add_generation_prompt)
    assert TaskModel(lm).apply_chat_template(messages, add_generation_prompt) == expected


@pytest.mark.ci
def test_answers_of_pieces_and_special_tokens_are_the_same(tmp_path: Path) -> None:
    """One request per batch: in a batch, `hf` continues after the name of a special token until all answers have ended."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from jaxgpt.tasks.harness import TaskModel

    save(lm_of_pieces(), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "hf")
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    ours = TaskModel(jaxgpt.load(tmp_path / "run"))
    for until in ([], ["b a", "\u00e9"], [" "], ["<|im_end|>", "Q:"], ["<s>"]):
        settings = {"until": until, "max_gen_toks": 16, "do_sample": False}
        texts = ("ab", " ab a", "\u00e9 ab<|im_start|>", "b ab b" * 9, "<s>aab")
        requests = [Instance("generate_until", {}, (text, settings), n) for n, text in enumerate(texts)]
        with quiet():
            assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True), until
