"""The page of an inspection: its numbers match the model, it is safe, and it works in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from folders import llama_tokenizer, run_folder
from helpers import jaxgpt, make, small
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt import study
from jaxgpt.cli.inspect import _table
from jaxgpt.config import Config
from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.model.params import count_parameters
from jaxgpt.study import inspected_arrays, inspection, page
from jaxgpt.study.inspection import Inspection, inspect, token_text

ODD = "a<script>alert(1)</script>&\"'\n\u202e\u200f שלום\U0001f600{x}`${y}\\"


@pytest.fixture(scope="module")
def lm() -> LM:
    tokenizer = CharTokenizer(ODD)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        config = small("gpt2", vocab_size=tokenizer.vocab_size, block_size=80, init_std=0.5)
        return LM(Config(model=config), make(config)[1], tokenizer)


@pytest.fixture(scope="module")
def found(lm: LM) -> Inspection:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return inspect(lm, ODD, max_new_tokens=4)


class Parsed(HTMLParser):
    """The tags, and the contents of the elements, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attrs = self.tags[-1] if self.tags else ("", {})
        name = f"#{attrs['id']}" if "id" in attrs else tag
        self.text[name] = self.text.get(name, "") + data


@pytest.fixture(scope="module")
def out(lm: LM, found: Inspection) -> study.ForwardPass:
    """The logits, attention patterns and residual stream of the inspected text."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return study.run(lm, [found.ids], ["h.*.attn.pattern", "resid.*"])


@pytest.mark.ci
def test_the_predictions_are_those_of_a_run(found: Inspection, out: study.ForwardPass) -> None:
    T = len(found.ids)
    assert found.prompt == T - 4
    assert len(found.tokens) == T
    assert "".join(found.tokens[: found.prompt]) == ODD

    p = np.asarray(jax.nn.softmax(out.logits[0]), np.float64)
    np.testing.assert_allclose(found.top_probabilities, -np.sort(-p)[:, :5], rtol=1e-5)
    np.testing.assert_allclose(found.next_probability, p[np.arange(T - 1), found.ids[1:]], rtol=1e-5)
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
    assert found.next_rank[T - 5 :].tolist() == [1] * 4, "greedy"
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.ci
def test_attention_and_norms_are_those_of_a_run(found: Inspection, out: study.ForwardPass) -> None:
    for layer in range(2):
        pattern = out.taps[f"h.{layer}.attn.pattern"][0]
        np.testing.assert_allclose(found.attention[layer], pattern, rtol=1e-5, atol=1e-7)
    norms = np.linalg.norm(out.taps["resid.pre.0"][0], axis=-1)
    np.testing.assert_allclose(found.norms[0], norms, rtol=1e-5)


def test_the_lens_ends_in_the_predictions(found: Inspection) -> None:
    assert found.lens_tokens[-1] == [words[0] for words in found.top_tokens]
    np.testing.assert_allclose(found.lens_probabilities[-1], found.top_probabilities[:, 0], rtol=1e-4)


@pytest.mark.ci
def test_heads_are_summarized(lm: LM, found: Inspection) -> None:
    heads = found.heads()
    assert [(each.layer, each.head) for each in heads] == [(layer, n) for layer in range(2) for n in range(4)]

    head = heads[5]  # head 1 of layer 1
    assert head.previous == pytest.approx(np.diagonal(found.attention[1, 1], -1).mean())
    edited = study.run(lm, [found.ids], [], {"h.1.attn.head_out": lambda x: x.at[:, :, 1].set(0)})
    log_p = np.asarray(jax.nn.log_softmax(edited.logits[0], -1))
    loss = -float(log_p[np.arange(len(found.ids) - 1), found.ids[1:]].mean())
    clean = -np.log(found.next_probability).mean()
    assert head.loss_increase == pytest.approx(loss - clean, abs=1e-5)


@pytest.mark.ci
def test_texts_of_similar_lengths_share_a_program(lm: LM) -> None:
    before = inspected_arrays._compute._cache_size()
    for prompt in (ODD[3:], ODD[5:]):
        inspect(lm, prompt, max_new_tokens=4)
    assert inspected_arrays._compute._cache_size() <= before + 1


def test_the_page_holds_the_weights_and_runs_nothing_of_the_text(found: Inspection) -> None:
    text = page.html(found, ODD)
    parsed = Parsed(text)
    data = json.loads(parsed.text["#data"])
    weights = np.frombuffer(base64.b64decode(data["weights"]), np.uint8).reshape(2, 4, -1) / 255
    below = np.tril_indices(len(found.ids))
    assert abs(weights - found.attention[:, :, below[0], below[1]]).max() <= 0.5 / 255 + 1e-6
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    script = files("jaxgpt.study").joinpath("page.js").read_text("utf-8")
    assert f"<script>{script}</script>" in text
    policy = next(attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in (policy or "")
    names = {name for _, attrs in parsed.tags for name in attrs}
    assert not {name for name in names if name in ("src", "href", "action") or name.startswith("on")}
    assert "\u202e" not in text
    assert re.findall(r"https?://", text) == []


def test_the_page_describes_the_text_and_shows_layers_in_one_direction(found: Inspection) -> None:
    text = page.html(found._replace(source="runs/a, step 3"), "runs/a")
    T = len(found.ids)
    summary = f"2 layers of 4 heads. {T} tokens: {T - 4} of the prompt, 4 generated greedily (underlined)."
    assert f"runs/a, step 3: {summary}" in text
    for name in ("lens", "norms"):
        table = text.split(f'<section aria-labelledby="h-{name}">')[1].split("</section>")[0]
        assert re.findall(r'<th scope="row">(\w+)</th>', table) == ["0", "1", "output"]


@pytest.mark.ci
def test_the_command(lm: LM, found: Inspection) -> None:
    run_folder(Path("run"), lm.config.model)
    options = ("--max-new-tokens", "2", "--html", "a.html", "--json")
    result = jaxgpt("inspect", "run", "--prompt", "To be", *options)
    assert result.code == 0, result.err
    assert (result.json["source"], result.json["prompt"]) == ("run, step 0", 5)
    assert len(result.json["tokens"]) == 7
    assert Path("a.html").read_text("utf-8").startswith("<!doctype html>")
    lines = _table(found).splitlines()[1:]
    assert len(lines) == len(found.ids)
    assert lines[0].split()[:2] == ["0", "'a'"]
    assert f" {found.next_probability[0]:.1%} " in lines[0]


def test_the_command_prints_the_bytes_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(to_json=dict)
    run_folder(Path("run"), small("gpt2"))
    monkeypatch.setattr("jaxgpt.lm.load", lambda *_: None)
    monkeypatch.setattr(inspection, "inspect", lambda *_, **__: found)
    monkeypatch.setattr(page, "html", lambda *_: "東" * 2000)
    result = jaxgpt("inspect", "run", "--html", "a.html")
    assert result.out == "wrote a.html: 6 kB\n", result.err


def test_too_long_a_text_is_rejected(lm: LM) -> None:
    with pytest.raises(UserError, match="a prompt of 7 tokens and 74 new tokens exceed the limit of 80"):
        inspect(lm, "aaaaaaa", max_new_tokens=74)


def model_of(tokenizer: Tokenizer, vocab_size: int = 0) -> LM:
    config = small("gpt2", vocab_size=vocab_size or tokenizer.vocab_size, block_size=80, n_layer=1, init_std=0.5)
    return LM(Config(model=config), make(config)[1], tokenizer)


@pytest.mark.ci
def test_ids_without_a_text_have_no_probability() -> None:
    """The table, the lens, the loss without each head and the generated text agree where the vocabulary is padded."""
    lm = model_of(CharTokenizer("abcdef"), 40)
    found = inspect(lm, "fade", max_new_tokens=2)
    p = np.asarray(jax.nn.softmax(study.run(lm, [found.ids]).logits[0, :, :6]), np.float64)
    np.testing.assert_allclose(found.top_probabilities, -np.sort(-p)[:, :5], rtol=1e-4)
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(-1), rtol=1e-4)
    assert found.lens_tokens[-1] == [words[0] for words in found.top_tokens]
    np.testing.assert_allclose(found.lens_probabilities[-1], found.top_probabilities[:, 0], rtol=1e-4)
    edits = {"h.0.attn.head_out": lambda x: x.at[:, :, 2].set(0)}
    log_p = jax.nn.log_softmax(study.run(lm, [found.ids], [], edits).logits[0, :-1, :6])
    loss = -np.take_along_axis(np.asarray(log_p), np.array(found.ids[1:])[:, None], -1).mean()
    assert found.loss_increase is not None
    assert found.loss_increase[0, 2] == pytest.approx(loss + np.log(found.next_probability).mean(), abs=1e-5)
    json.dumps(found.to_json(), allow_nan=False)


def test_diverged_weights_are_one_line(lm: LM) -> None:
    broken = lm._replace(params=jax.tree.map(lambda x: x * np.float32("nan"), lm.params))
    with pytest.raises(UserError, match="the weights have diverged"):
        inspect(broken, "alert", max_new_tokens=0)


def test_tokens_keep_their_spaces_and_bytes() -> None:
    """A SentencePiece decoder drops the first space of a text, and returns the same sign for any part of a character."""
    tokenizer = SubwordTokenizer(HFTokenizer.from_str(json.dumps(llama_tokenizer())))
    first = int(tokenizer.encode("a")[0])
    last = int(tokenizer.encode("a a")[-1])
    assert token_text(tokenizer, last) == "a"
    ids = (last, 3 + 0xC3, 3 + 0xA9, 3 + 0x41)
    assert [token_text(tokenizer, i, first) for i in ids] == [" a", "<0xC3>", "<0xA9>", "A"]
    assert token_text(ByteTokenizer(), 0xA9, 0xC3) == "<0xA9>", "which becomes a character after its first byte"
    bpe = train_bpe([["a"]], 300)
    assert [token_text(bpe, i, 0) for i in bpe.encode(" \u00e9").tolist()] == [" ", "<0xC3>", "<0xA9>"]
    assert token_text(WordTokenizer(["one", "two"]), 1, 0) == "two"


def test_a_byte_that_is_a_character_is_text_after_an_incomplete_one() -> None:
    """A decoder of bytes shows no character of a run of bytes that is not UTF-8."""
    tokenizer = SubwordTokenizer(HFTokenizer.from_str(json.dumps(llama_tokenizer())))
    assert token_text(tokenizer, 3 + 0x65, first=3 + 0xC3) == "e"


def test_a_text_of_one_token_has_no_loss(lm: LM, found: Inspection) -> None:
    assert "The model or the text is too large to compute the loss without each head." in page.html(
        found._replace(loss_increase=None), "x"
    )
    text = page.html(inspect(lm, ODD[0], max_new_tokens=0), "x")
    assert "A text of one token has no loss." in text
    assert "too large" not in text


@pytest.mark.ci
def test_heads_are_ablated_up_to_a_number_of_operations_of_the_text(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm.config.model
    T = len(lm.tokenizer.encode(ODD))
    for less in (0, 1):
        monkeypatch.setattr(
            inspected_arrays, "ABLATION", 2 * count_parameters(model) * T * model.n_layer * model.n_head - less
        )
        assert (inspect(lm, ODD, max_new_tokens=0).loss_increase is None) == bool(less)


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_works_in_a_browser(found: Inspection) -> None:
    """Pointing, clicks and keys work; nothing is logged or requested; the shades are the model's attention."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    Path("page.html").write_text(page.html(found, ODD), "utf-8")
    events: list[Any] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 390, "height": 800})
        for kind in ("console", "pageerror", "dialog"):
            tab.on(kind, lambda event: events.append(event))
        tab.on("request", lambda request: None if request.url.startswith("file:") else events.append(request.url))
        tab.goto(Path("page.html").absolute().as_uri())
        status = tab.locator("#status")
        tab.locator(".h").nth(6).click()
        tab.locator(".t").nth(9).click()
        tab.keyboard.press("ArrowLeft")
        keys = found.attention[1, 2, 8]
        best = int(keys.argmax())
        this, token = (page.visible(found.tokens[i], page.DOT) for i in (8, best))
        attends = f'Layer 1, head 2: token 8, "{this}", attends to "{token}" ({best}) {round(100 * keys[best])}%'
        assert status.inner_text().startswith(attends)
        shade = tab.locator(".t").nth(best).evaluate("e => e.style.backgroundColor")
        assert float(re.findall(r"[\d.]+", shade)[-1]) == pytest.approx(0.85 * keys[best], abs=0.01)
        tab.locator(".t").nth(3).hover()
        assert ": token 3, " in status.inner_text()
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wide tables scroll separately"
        plain = browser.new_context(java_script_enabled=False).new_page()
        plain.goto(Path("page.html").absolute().as_uri())
        assert plain.locator("#h-lens").is_visible()
        assert not plain.locator(".maps").is_visible()
        browser.close()
    assert events == []
