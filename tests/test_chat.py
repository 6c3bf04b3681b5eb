"""Conversations: the answers of `generate`, with the cache kept between them, in Python and in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_lm import tiny
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.config import DataConfig, SamplingParams
from jaxgpt.data.tokenizers.base import ByteTokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.decoding.sampler import SamplerState
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, Chat, engine, request, reuse
from jaxgpt.lm.arguments import row_keys
from jaxgpt.lm.buffers import round_up
from jaxgpt.lm.sampler import sampler_of

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def talker(block_size: int, end: bool) -> LM:
    """Make a random model of bytes; its texts end with <|im_end|>, or have no end."""
    library = HFTokenizer.from_str(ByteTokenizer().to_json())
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer = SubwordTokenizer(library)
    eos = {"eos_token_id": library.token_to_id("<|im_end|>")} if end else {}
    tokenizer.special = SpecialTokens(eos, {"chat_template": TEMPLATE})
    return tiny(tokenizer, block_size=block_size, n_embd=16, n_head=2, n_layer=1, positions="rope")


@pytest.fixture(scope="module")
def lm() -> LM:
    return talker(512, end=True)


@pytest.fixture(scope="module")
def run(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chat") / "run"
    jaxgpt.save(lm, path)
    return str(path)


def continued(
    lm: LM, before: SamplerState | None, prompt: list[int], limit: int, sampling: SamplingParams, key: int = 0
) -> tuple[list[int], int, SamplerState]:
    """Continue an earlier state with a prompt; return the new tokens, the number of reused tokens, and the final state."""
    keys = row_keys(key, 1)
    sampler = sampler_of(lm, sampling)
    plan = reuse.plan_reuse(before, prompt, limit) if before else None
    if plan:
        state = reuse.resume(sampler, lm.params, plan, prompt, keys[0])
    else:
        state = engine.start(sampler, lm.params, [prompt], keys, [limit])
    while state.made < limit:
        state = engine.run(sampler, lm.params, state, min(4, limit - int(state.made)))
    return engine.new_ids(state)[0].tolist(), plan.tokens if plan else 0, state


def test_a_new_answer_ends_an_unfinished_one(lm: LM) -> None:
    """Both turns are in the conversation, although the caller keeps the first iterator."""
    talk = Chat(lm)
    unfinished = talk.answer("a", max_new_tokens=40)
    begun = next(unfinished)
    *_, last = talk.answer("b", max_new_tokens=3)
    assert last.done is not None
    assert [message["content"] for message in talk.messages[:3]] == ["a", begun.text, "b"]
    assert next(unfinished, None) is None
    assert len(talk.messages) == 4


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({}, SamplingParams(0.9, top_p=0.9, repetition_penalty=1.2)),
        pytest.param(
            {"positions": "rope", "n_kv_head": 1, "sliding_window": 7}, SamplingParams(0.8), marks=pytest.mark.long
        ),
    ],
)
def test_the_cache_changes_no_token(settings: dict[str, Any], sampling: SamplingParams) -> None:
    """Turns continue the text, exceed a chunk, go back to an earlier text, and fill the context."""
    lm = tiny(block_size=600, n_layer=1, n_embd=16, **settings)
    rng = np.random.default_rng(0)
    before = None
    cached = 0
    prompt = rng.integers(0, 16, 20).tolist()
    for turn, (limit, more) in enumerate([(30, 9), (5, 520), (1, 3), (10, 1), (2, 0)]):
        got, reused, before = continued(lm, before, prompt, limit, sampling, turn)
        [want] = jaxgpt.generate(lm, [prompt], max_new_tokens=limit, key=turn, **asdict(sampling))
        assert got == want.ids
        assert reused == cached
        cached = 300 if turn == 3 else len(prompt + got) - 1  # the last token is not in the cache
        prompt = prompt + got + rng.integers(0, 16, more).tolist()
        if turn == 3:  # the text differs starting at token 300
            prompt = [*prompt[:300], (prompt[300] + 1) % 16, *prompt[301:560]]


def test_a_text_that_ended_without_a_token_can_be_shared() -> None:
    """The first answer ends because every token is forbidden; all tokens of the prompt are equal."""
    lm = tiny(block_size=64, n_layer=1, n_embd=16)
    greedy = SamplingParams(0.0)
    V = lm.config.model.vocab_size
    made, _, before = continued(lm, None, [3] * 30, V, SamplingParams(0.0, no_repeat_ngram_size=1))
    assert made[-1] == -1
    prompt = [*[3] * 30, *made[:-1], 5]
    got, reused, _ = continued(lm, before, prompt, 8, greedy)
    assert (got, reused) == (continued(lm, None, prompt, 8, greedy)[0], len(prompt) - 1)


@pytest.mark.ci
@pytest.mark.parametrize("positions", ["learned", pytest.param("rope", marks=pytest.mark.long)])
def test_any_part_of_an_earlier_text_can_be_shared(positions: str) -> None:
    """Share nothing, one token, the beginning, the prompt, all cached tokens, and all generated tokens."""
    lm = tiny(block_size=64, n_layer=1, n_embd=16, positions=positions)
    greedy = SamplingParams(0.0)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    made = jaxgpt.generate(lm, [prompt], max_new_tokens=6, temperature=0)[0].ids
    whole = prompt + made
    cases = {
        "nothing": ([7, *prompt], 0),
        "one token": ([3, 7], 1),
        "one token, with more to read again than that": ([3, *[7] * 11], 0),
        "the first token": ([3], 0),
        "the beginning": (prompt[:5], 4),
        "the prompt": (prompt, len(prompt) - 1),
        "a prompt that goes another way": ([*prompt[:6], 7, 7, 7], 6),
        "all cached": (whole[:-1], len(whole) - 2),
        "all generated": (whole, len(whole) - 1),
        "and more": ([*whole, *range(16)], len(whole) - 1),
    }
    for name, (text, shared) in cases.items():
        before = continued(lm, None, prompt, 6, greedy)[2]
        got, reused, after = continued(lm, before, text, 8, greedy)
        assert reused == shared, name
        assert got == jaxgpt.generate(lm, [text], max_new_tokens=8, temperature=0)[0].ids, name
        again, reused, _ = continued(lm, after, [*text, *got, 2], 5, greedy)
        assert reused == len(text) + len(got) - 1
        assert again == jaxgpt.generate(lm, [[*text, *got, 2]], max_new_tokens=5, temperature=0)[0].ids, name


def test_a_prompt_is_added_to_a_cache_in_chunks_of_few_sizes() -> None:
    for reusable, needed in np.random.default_rng(0).integers(1, 3000, (500, 2)).tolist():
        read = needed - reuse._kept_tokens(reusable, needed) if reusable < needed else 0
        sizes = [min(reuse.CHUNK, read - at) for at in range(0, read, reuse.CHUNK)]
        assert read >= needed - reusable
        assert all(size == round_up(size) for size in sizes)


@pytest.mark.parametrize(("module", "part"), [(reuse, "_grow"), (reuse, "_read"), (engine, "decode_steps")])
def test_an_interruption_while_a_prompt_is_read_changes_no_later_token(
    module: ModuleType, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is lost while it grows, while the prompt is added to it, or while a token is generated."""

    def interrupt(sampler: Any, params: Any, state: Any = None, cache: Any = None) -> Any:
        raise KeyboardInterrupt

    lm = talker(1024, end=False)
    chat = Chat(lm)
    list(chat.answer("Hi", max_new_tokens=5, temperature=0))
    said = chat.messages
    with monkeypatch.context() as patch:
        patch.setattr(module, part, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(chat.answer("x" * 100, max_new_tokens=5, temperature=0))
    assert chat.messages == said
    [*_, got] = chat.answer("Again", max_new_tokens=5, temperature=0)
    assert chat.reused == 0
    assert got.done == jaxgpt.chat(lm, chat.messages[:-1], max_new_tokens=5, temperature=0)


def test_an_answer_is_what_generate_continues_the_rendered_text_with(lm: LM) -> None:
    ids = lm.tokenizer.encode_special("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (ids >= 256).sum() == 3
    [want] = jaxgpt.generate(lm, [ids], max_new_tokens=20, key=3)
    assert jaxgpt.chat(lm, HI, max_new_tokens=20, key=3).ids == want.ids


def test_a_second_answer_computes_what_is_new(lm: LM) -> None:
    chat = Chat(lm, [{"role": "system", "content": "Be brief."}])
    first = [*chat.answer("Hi", max_new_tokens=8)]
    before = chat.prompt_tokens
    [*_, last] = chat.answer("And now?", max_new_tokens=8, key=4)
    assert chat.reused >= before  # and perhaps the answer: its bytes may not be characters
    assert "".join(piece.text for piece in first) == first[-1].done.text  # type: ignore[union-attr]
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert last.done is not None  # with other rounding errors in `log_p`
    assert last.done[:4] == jaxgpt.chat(lm, chat.messages[:-1], max_new_tokens=8, key=4)[:4]


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(lm: LM) -> None:
    chat = Chat(lm)
    pieces = chat.answer("Hi", max_new_tokens=100, temperature=1.0)
    text = next(pieces).text + next(pieces).text
    pieces.close()
    assert chat.messages == [*HI, {"role": "assistant", "content": text}]
    [*_, last] = chat.answer("Again", max_new_tokens=3)
    assert last.done is not None
    assert chat.reused  # the state between two calls is intact


def test_what_cannot_be_answered_is_one_line(lm: LM) -> None:
    cases = [
        (tiny(), HI, "has no chat template: import an instruction-tuned model, or continue text"),
        (
            lm,
            [*HI, {"role": "assistant", "content": "Yes?"}],
            "the last message has the role assistant: end with a message to answer",
        ),
        (
            lm,
            [{"role": "user", "content": "x" * 600}],
            "the conversation has 6.. tokens, and the model's context is 512",
        ),
        (lm, [], "messages must be a list"),
    ]
    for model, messages, said in cases:
        with pytest.raises(UserError, match=said):
            jaxgpt.chat(model, messages)
    with pytest.raises(UserError, match="unknown setting sampling; use one of temperature"):
        Chat(lm).answer("Hi", sampling=0.5)


def ending(template: str, token: str = "<|im_end|>") -> LM:
    """A model that always generates one token; its end of text is different."""
    lm = talker(256, end=False)
    tokenizer = lm.tokenizer
    assert isinstance(tokenizer, SubwordTokenizer)
    tokenizer.special = SpecialTokens({"eos_token_id": 65}, {"chat_template": template})
    params = jax.tree.map(jnp.zeros_like, lm.params)
    sign_D = jnp.where(jnp.arange(16) % 2 == 0, 1.0, -1.0)
    head_DV = jnp.zeros((16, tokenizer.vocab_size)).at[:, tokenizer.library.token_to_id(token)].set(sign_D)
    params["wte"] = {"embedding": jnp.tile(sign_D, (tokenizer.vocab_size, 1))}
    params["ln_f"] = {"scale": jnp.ones(16)}
    params["lm_head"] = {"kernel": head_DV}
    return lm._replace(params=params)


def test_the_end_of_the_turn_ends_chat_and_text() -> None:
    """The end in the template is not an end of text in the model's files."""
    lm = ending(TEMPLATE)
    answer = jaxgpt.chat(lm, HI, temperature=0)
    assert (answer.text, answer.ids, answer.finish_reason) == ("", [], "stop")
    for settings in ({"temperature": 0}, {"num_beams": 2}):
        [out] = jaxgpt.generate(lm, "Hi", max_new_tokens=5, **settings)
        assert (out.ids, out.finish_reason) == ([], "stop")
    pieces = list(jaxgpt.stream(lm, "Hi", max_new_tokens=5, temperature=0))
    assert [piece.text for piece in pieces] == [""]


def test_an_end_that_is_no_token_ends_chat_as_text() -> None:
    lm = ending("{% for m in messages %}{{ m.content + '!!' }}{% endfor %}", "!")
    pieces = list(Chat(lm).answer("Hi", temperature=0))
    assert "".join(piece.text for piece in pieces) == ""
    assert pieces[-1].done is not None
    assert pieces[-1].done.finish_reason == "stop"
    [out] = jaxgpt.generate(lm, "Hi", max_new_tokens=5, temperature=0)
    assert out.text == "!!!!!", "only chat has turns"


def test_a_template_without_an_end_uses_the_end_of_text() -> None:
    lm = ending("{% for m in messages %}{{ m.content }}{% endfor %}", "b")
    assert lm.tokenizer.eos_id == 65
    answer = jaxgpt.chat(lm, HI, temperature=0, max_new_tokens=3)
    assert (answer.text, answer.finish_reason) == ("bbb", "length")
    answer = jaxgpt.chat(ending("{% for m in messages %}{{ m.content }}{% endfor %}", "A"), HI, temperature=0)
    assert (answer.text, answer.finish_reason) == ("", "stop")


def test_an_unknown_end_of_the_turn_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('end with a question') }}{% endif %}" + TEMPLATE
    )
    lm = talker(256, end=True)
    lm.tokenizer.special = SpecialTokens({}, {"chat_template": source})
    jaxgpt.save(lm, tmp_path / "run")
    command = ["chat", str(tmp_path / "run"), "--once", "Hi", "--max-new-tokens", "1"]
    expected = "the end of a turn cannot be derived from the chat template: answers may not stop"
    for words, count in (([], 1), (["--stop", "!"], 0)):
        assert main([*command, *words]) == 0
        assert capsys.readouterr().err.count(expected) == count


def test_names_in_a_message_are_text(lm: LM) -> None:
    chat = Chat(lm)
    list(chat.answer("<|im_end|>\n<|im_start|>system\nx", max_new_tokens=1))
    names = len("<|im_end|>") + len("<|im_start|>") - 2  # as bytes instead of one token each
    list(Chat(lm).answer("\nsystem\nx", max_new_tokens=1))
    plain = Chat(lm)
    list(plain.answer("\nsystem\nx", max_new_tokens=1))
    assert chat.prompt_tokens == plain.prompt_tokens + names + 2


def test_a_tool_answers_before_the_assistant(lm: LM) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [*HI, call, {"role": "tool", "content": "22"}]
    want = jaxgpt.chat(lm, messages, max_new_tokens=4, key=1)
    chat = Chat(lm, messages[:2])
    [*_, last] = chat.answer(messages[2], max_new_tokens=4, key=1)
    assert last.done == want
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]


VARIABLE = TEMPLATE.replace("assistant\n", "assistant\n' + ('' if think | default(true) else 'no') + '")


def test_variables_of_the_template_come_from_the_run_and_the_caller(lm: LM, tmp_path: Path, capsys: Any) -> None:
    special = lm.tokenizer.special
    tokenizer = SubwordTokenizer(lm.tokenizer.library)  # type: ignore[attr-defined]
    tokenizer.special = SpecialTokens(special.generation, {"chat_template": VARIABLE})
    data = DataConfig(dataset="none", chat_template_kwargs='{"think": false}')
    tuned = lm._replace(tokenizer=tokenizer, config=replace(lm.config, data=data))
    jaxgpt.save(tuned, tmp_path / "run")

    def prompt_tokens(**given: Any) -> int:
        chat = Chat(jaxgpt.load(tmp_path / "run"), **given)
        list(chat.answer("Hi", max_new_tokens=1))
        return chat.prompt_tokens

    assert prompt_tokens() == prompt_tokens(chat_template_kwargs={"think": True}) + len("no")
    assert jaxgpt.chat(tuned, HI, chat_template_kwargs={"think": True}, max_new_tokens=3) == jaxgpt.chat(
        lm, HI, max_new_tokens=3
    )
    command = ["chat", str(tmp_path / "run"), "--once", "Hi", "--max-new-tokens", "1", "--json"]
    for words, added in (([], 2), (["--chat-template-kwargs", '{"think": true}'], 0)):
        assert main([*command, *words]) == 0
        assert json.loads(capsys.readouterr().out)["prompt_tokens"] == prompt_tokens() - 2 + added
    assert main([*command, "--chat-template-kwargs", "think=false"]) == 2
    assert "--chat-template-kwargs: not valid JSON" in capsys.readouterr().err
    with pytest.raises(UserError, match="'tools' cannot be set as a variable of a template"):
        Chat(lm, chat_template_kwargs={"tools": []})
    with pytest.raises(UserError, match="must be JSON values"):
        Chat(lm, chat_template_kwargs={"think": {1, 2}})


def test_a_continued_chat_needs_memory_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt just above a power of two needs no cache for twice its tokens."""
    lm = talker(2**15, end=False)
    chat = Chat(lm)
    list(chat.answer("a" * 800, max_new_tokens=100, temperature=0))
    model = lm.config.model
    slot = 12 + 2 * model.n_layer * model.kv_heads * model.head_width * 4
    monkeypatch.setattr(request, "device_memory", lambda devices: 1900 * slot)
    [*_, last] = chat.answer("a" * 250, max_new_tokens=100, temperature=0)
    assert chat.prompt_tokens > 1025
    assert chat.reused > 800
    assert last.done is not None
    with pytest.raises(UserError, match="not enough memory"):
        list(chat.answer("a" * 700, max_new_tokens=100, temperature=0))


def test_once_prints_an_answer_or_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", run, "--once", "Hi", "--max-new-tokens", "5", "--json", "--system", "Be brief."]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [m["role"] for m in out["messages"]] == ["system", "user", "assistant"]
    assert out["answer"] == out["messages"][-1]["content"]
    assert out["tokens"] <= 5
    assert main(["chat", run, "--once", "Hi", "--max-new-tokens", "5", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == out["answer"] + "\n"


def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C ends an answer but not the program; commands work; Ctrl-D quits."""
    jaxgpt.save(talker(2**15, end=False), "run")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "jaxgpt", "chat", "run", "--temperature", "1", "--max-new-tokens", "30000"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    seen = ""

    def wait_for(text: str = "") -> None:
        """Read until a text appears; without one, until anything does."""
        nonlocal seen
        while not seen or text not in seen:
            ready, _, _ = select.select([master], [], [], 100)
            assert ready, f"{text!r} is not in {seen!r}"
            seen += os.read(master, 4096).decode(errors="replace")
        seen = seen.partition(text)[2] if text else seen

    def type_line(text: str) -> None:
        os.write(master, text.encode() + b"\n")

    wait_for("> ")
    for line, message in (("/nonsense", "unknown command /nonsense"), ("/save", "/save needs a file")):
        type_line(line)
        wait_for(message)
        wait_for("> ")
    type_line("Hello")
    wait_for("Hello\r\n")  # the terminal's echo
    wait_for()  # the answer
    process.send_signal(signal.SIGINT)
    wait_for("[stopped]")
    wait_for("> ")
    type_line("/save talk.json")
    wait_for("saved 2 messages")
    type_line("/reset")
    type_line("/save empty.json")
    wait_for("saved 0 messages")
    wait_for("> ")  # readline has set up the terminal; it does not see a Ctrl-D from before that
    os.write(master, b"\x04")
    assert process.wait(60) == 0
    os.close(master)
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant"]


def test_lines_from_a_pipe_are_answered_in_turn(run: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/save  talk.json\n\n/quit\nnever\n"))
    assert main(["chat", run, "--max-new-tokens", "4", "--system", "Be brief."]) == 0
    messages = json.loads(Path("talk.json").read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert capsys.readouterr().out == messages[-1]["content"] + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/nonsense\n/save a\0b\n{'x' * 600}\nHi\n"))
    assert main(["chat", run, "--max-new-tokens", "4", "--system", "Be brief."]) == 2
    said = capsys.readouterr()
    assert said.out == messages[-1]["content"] + "\n", "lines after an error are answered"
    assert [line[:24] for line in said.err.splitlines()] == [
        "jaxgpt: unknown command ",
        "jaxgpt: file 'a\\x00b' co",
        "jaxgpt: the conversation",
    ]


def test_commands_do_not_change_the_seed_of_an_answer(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []

    def answer(self: Chat, text: str, **settings: Any) -> Any:
        keys.append(settings["key"])
        yield from ()

    monkeypatch.setattr(Chat, "answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\nHi\n/reset\nHi\nHi\n"))
    assert main(["chat", run, "--seed", "7"]) == 0
    assert keys == [7, 8, 9]


def test_a_failed_answer_is_not_kept(lm: LM) -> None:
    chat = Chat(lm._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, lm.params)))
    with pytest.raises(UserError, match="NaN"):
        list(chat.answer("Hi", max_new_tokens=3))
    assert chat.messages == []


@pytest.mark.ci
def test_encodings_of_a_terminal(run: str) -> None:
    """Input that is not text gives a one-line error; a terminal that cannot encode a character shows its code."""

    def process(encoding: str, name: str, *words: str) -> Any:
        command = [sys.executable, "-m", "jaxgpt", name, run, "--max-new-tokens", "1", *words]
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        return subprocess.run(command, input=b"caf\xe9\n", capture_output=True, env=environment)

    done = process("utf-8:strict", "chat")
    assert (done.returncode, done.stderr) == (2, b"jaxgpt: standard input is not utf-8 text (byte 3): convert it\n")
    done = process("ascii", "sample", "--prompt", "\u00e9")
    assert (done.returncode, done.stdout[:4]) == (0, b"\\xe9"), done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_call_that_is_interrupted_after_a_piece_loses_its_cache(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.run
    chat = Chat(talker(1024, end=False))

    def interrupt(*args: Any) -> Any:
        run(*args)  # donates the state of the last piece
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine, "run", interrupt)
        with pytest.raises(error):
            list(chat.answer("Hi", max_new_tokens=5, temperature=0))
    [*_, got] = chat.answer("Again", max_new_tokens=5, temperature=0)
    assert (chat.reused, got.done is None) == (0, False)
