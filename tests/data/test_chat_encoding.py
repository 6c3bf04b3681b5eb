"""Training and chat encode a conversation alike: targets, ends of turns, reasoning, tools and variables."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from folders import llama_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_template import MARKED, PUBLISHED, TALK, VARIABLES
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt.config import DataConfig
from jaxgpt.data.chat.encoding import ChatFormat, chat_format, stop_ids
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.chat.turn_end import TurnEnd
from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

START = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
PLAIN = TURNS + START
# Generation marks that leave the end of the turn outside.
MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + START
)
# Generation marks that include the header, which chat sends.
HEADED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}" + START
)
# As in Qwen 3: the last answer gets an empty think block; earlier answers lose their reasoning.
THINK = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set content = m.content %}
{%- if m.role == 'assistant' %}{% set reasoning = '' %}
{%- if '</think>' in content %}{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if loop.last %}{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{% endif %}
{{- content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
TEMPLATES = PUBLISHED | {
    "marked": MARKED,
    "plain": PLAIN,
    "marks": MARKS,
    "headed": HEADED,
    "think": THINK,
    "capitals": PLAIN.replace("m.content", "m.content | upper"),
    "no header": TURNS,
    "no end": "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "text": "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n###\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}",
}
NAMES = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|assistant|>",
    "<|start_header_id|>",
]
ADDED = ["<think>", "</think>", "<start_of_turn>"]  # not special


def added(library: Any, **flags: Any) -> SubwordTokenizer:
    """Add tokens to a library's tokenizer; the flags apply to special tokens."""
    library.add_special_tokens([AddedToken(name, special=True, **flags) for name in NAMES])
    library.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    return SubwordTokenizer(library)


def from_bytes() -> Any:
    return HFTokenizer.from_str(ByteTokenizer().to_json())


def with_spaces(prepend: str) -> Any:
    """The tokenizer of Llama 2, with a pre-tokenizer that prepends a space to a text ("first") or each part ("always")."""
    value = llama_tokenizer()
    if prepend != "normalizer":
        value["normalizer"] = None
    library = HFTokenizer.from_str(json.dumps(value))
    if prepend != "normalizer":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    return library


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer of a kind, with special tokens if the kind has them."""
    made: Tokenizer
    match kind:
        case "bytes":
            made = added(from_bytes())
        case "bpe":
            text = MARKED + json.dumps(TALK) + "assistant\nHello. \n\n And now? system user ###\n" * 9
            made = added(HFTokenizer.from_str(train_bpe([[text]], 400).to_json()))
        case "spaces first" | "spaces always" | "spaces normalizer":
            made = added(with_spaces(kind.split()[1]))
        case "prefix space":
            library = from_bytes()
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            made = added(library)
        case "normalized":  # the normalizer also removes the mark of names in messages
            library = from_bytes()
            removing = normalizers.Replace(Regex(r"[\x{fdd0}-\x{fdef}]"), "")
            library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), removing])
            made = added(library, normalized=True)
        case "stripping":
            made = added(from_bytes(), rstrip=True, lstrip=True)
        case "byte":
            made = ByteTokenizer()
        case "char":
            made = CharTokenizer(map(chr, range(0x180)))
    end = made.library.token_to_id("</s>") if isinstance(made, SubwordTokenizer) else 3
    made.special = SpecialTokens({"eos_token_id": end}, {"bos_token": "<s>", "eos_token": "</s>"})
    return made


KINDS = [
    *("bytes", "bpe", "spaces first", "spaces always", "spaces normalizer", "prefix space", "normalized", "stripping"),
    *("byte", "char"),
]
LOSSLESS = ("bytes", "bpe", "byte", "char")  # decoding restores the text


@cache
def form(name: str, kind: str) -> ChatFormat:
    return ChatFormat(ChatTemplate(TEMPLATES[name], VARIABLES), tokenizer(kind))


def controls(ids: Any, kind: str) -> dict[str, int]:
    """Count the special tokens among ids."""
    own = tokenizer(kind)
    names = NAMES if isinstance(own, SubwordTokenizer) else []
    return {name: list(ids).count(own.library.token_to_id(name)) for name in names}  # type: ignore[attr-defined]


PIECES = [
    *(
        *NAMES,
        "<|im_",
        "end|>",
        "<|IM_END|>",
        "<",
        "|im_end|>",
        "###",
        " ",
        "\n",
        "\n\n",
        "  ",
        "Hello",
        " no",
        "!",
        "ab",
    ),
    *("é", "a", "ÿ", "<script>", "[INST]", "x < y"),
]
contents = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
talks = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)


def conversation(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
@given(turns=talks)
@settings(max_examples=8)
def test_training_ids_are_the_ids_that_chat_sends_and_the_answer_and_the_end(
    name: str, kind: str, turns: list[tuple[str, str]]
) -> None:
    own = form(name, kind)
    messages = conversation(turns)
    encoded = own.encode(messages)

    # The last sequence ends with the last answer.
    prompt = own.prompt_ids(messages[:-1])
    last = encoded[-1]
    answer = last.ids[len(prompt) :].tolist()
    assert last.ids[: len(prompt)].tolist() == prompt
    assert last.is_target[len(prompt) :].all()
    assert not last.is_target[len(prompt) - 1]
    if own.end.stop_id is not None:
        assert answer[-1] == own.end.stop_id
    if kind in LOSSLESS and name not in ("llama-2", "llama-3", "gemma", "capitals"):
        end = own.end.text or own.tokenizer.decode(list(own.end.ids))
        assert own.tokenizer.decode(answer) == messages[-1]["content"] + end

    # Names in messages are text, so there are as many control tokens as with harmless messages.
    harmless = own.encode(conversation([("a", "a")] * len(turns)))
    for one, two in zip(encoded, harmless, strict=True):
        assert controls(one.ids, kind) == controls(two.ids, kind)
        assert controls(one.ids[one.is_target], kind) == controls(two.ids[two.is_target], kind)

    # A conversation that is continued keeps its ids.
    for n in range(2, len(messages), 2):
        earlier = own.encode(messages[:n])
        assert all(
            np.array_equal(a.ids, b.ids[: len(a.ids)]) and np.array_equal(a.is_target, b.is_target[: len(a.ids)])
            for a, b in zip(earlier, encoded, strict=False)
        )


def said(own: ChatFormat, messages: list[Any], tools: Any = None) -> list[str]:
    """Return the text of the targets of each sequence."""
    return [own.tokenizer.decode(ids[is_target]) for ids, is_target in own.encode(messages, tools)]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("chatml", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("llama-2", [" Hello. Zażółć 👋 </s>", " Bye. </s>"]),
        ("llama-3", ["Hello. Zażółć 👋<|eot_id|>", "Bye.<|eot_id|>"]),
        ("zephyr", ["Hello. Zażółć 👋</s>", "Bye.</s>"]),
        ("gemma", ["Hello. Zażółć 👋<end_of_turn>", "Bye.<end_of_turn>"]),
        ("marked", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("marks", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("headed", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("think", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("no header", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("no end", ["Hello. Zażółć 👋</s>", "Bye.</s>"]),
        ("text", ["Hello. Zażółć 👋\n###", "Bye.\n###"]),
    ],
)
def test_the_targets_are_the_answers_with_their_ends(name: str, answers: list[str]) -> None:
    """The header and an empty think block, which only the template adds, are no targets."""
    assert said(form(name, "bytes"), TALK) == ["".join(answers)]


@pytest.mark.parametrize("name", ["marked", "marks", "plain", "think", "no end"])
def test_the_end_of_an_empty_answer_is_a_target(name: str) -> None:
    own = form(name, "bytes")
    end = own.end.text or "</s>"
    assert said(own, [TALK[0], assistant(""), *TALK[2:]]) == [f"{end}Bye.{end}"]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("chatml", TurnEnd("<|im_end|>", stop_id=259)),
        ("llama-2", TurnEnd(" </s>", stop_id=257)),
        ("no end", TurnEnd(ids=(257,), added="</s>", stop_id=257)),
        ("text", TurnEnd("\n###", stop="\n###")),
    ],
)
def test_the_end_of_a_turn_comes_from_the_template(name: str, end: TurnEnd) -> None:
    assert form(name, "bytes").end == end


NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
# Text before a template, the expression of a content, and the rendered answer.
CHANGES = {
    "needs a system message": (NEEDS_SYSTEM, "m.content", "Yes."),
    "omits all without a system message": (
        "{% set messages = messages if messages[0].role == 'system' else [] %}",
        "m.content",
        "Yes.",
    ),
    "capitals": ("", "(m.content | upper)", "YES."),
    "escapes": ("", "(m.content | urlencode | replace('e', '%65'))", "Y%65s."),
    "strips letters": ("", "m.content.strip('Zqrs.')", "Ye"),
    "reverses": ("", "(m.content | reverse)", ".seY"),
    "truncates": ("", "m.content[:3]", "Yes"),
    "needs a think block": ("", "m.content.split('</think>')[1 if m.role == 'assistant' else 0]", "Yes."),
    "needs a system message with parts": (NEEDS_SYSTEM, "m.content[0].text", "Yes."),
}


@pytest.mark.parametrize("base", [PLAIN, MARKS], ids=["plain", "marks"])
@pytest.mark.parametrize("case", CHANGES)
def test_the_end_of_a_turn_is_known_if_the_template_needs_or_changes_more(case: str, base: str) -> None:
    before, content, answer = CHANGES[case]
    own = ChatFormat(ChatTemplate(before + base.replace("m.content", content)), tokenizer("bytes"))
    assert own.end == TurnEnd("<|im_end|>", stop_id=259)
    assert own.warning == ""
    given = "</think>Yes." if "think" in case else "Yes."
    messages = [{"role": "system", "content": "Be brief."}, user("Is it?"), assistant(given)]
    assert said(own, messages) == [answer + "<|im_end|>"]
    [encoded] = own.encode(messages)
    prompt = own.prompt_ids(messages[:2])
    assert encoded.ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("base", [PLAIN, MARKS], ids=["plain", "marks"])
@pytest.mark.parametrize("case", CHANGES)
def test_the_text_around_a_user_is_without_the_message_even_if_the_template_changes_it(case: str, base: str) -> None:
    """Otherwise, an added token such as QUESTION would be a control token."""
    before, content, _ = CHANGES[case]
    own = ChatFormat(ChatTemplate(before + base.replace("m.content", content)), tokenizer("bytes"))
    assert own.frame.around_user.endswith("<|im_start|>user\n\n<|im_end|>\n")


def test_an_unknown_end_of_a_turn_is_a_warning() -> None:
    own = ChatFormat(
        ChatTemplate("{% if messages | length < 9 %}{{ raise_exception('short') }}{% endif %}"), tokenizer("bytes")
    )
    assert own.warning.startswith("the end of a turn cannot be derived from the chat template: answers may not stop")


def test_a_template_without_an_end_and_no_end_of_text_is_a_warning() -> None:
    own = ChatFormat(ChatTemplate(TEMPLATES["no end"]), ByteTokenizer())
    assert own.warning.startswith(
        "the chat template renders no end of a turn, and the tokenizer has no end-of-text token"
    )


def test_text_parts_are_joined_for_a_template_of_texts_that_needs_a_system_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate(NEEDS_SYSTEM + PLAIN)
    messages = [{"role": "system", "content": "x"}, user(parts)]
    assert "ab<|im_end|>" in template.render(messages).text


# The end of an answer is printed before the next message, so not after the last answer.
BETWEEN = (
    "{% for m in messages %}{% if not loop.first and m.role == 'user' %}{{ eos_token }}{% endif %}{{ '<|im_start|>' + m.role }}"
    "{% if m.role == 'assistant' %}{GENERATION}{{ m.content }}{END}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
MARKED_BETWEEN = BETWEEN.replace("{GENERATION}", "{% generation %}").replace("{END}", "{% endgeneration %}")


between = pytest.mark.parametrize("source", [BETWEEN.replace("{GENERATION}", "").replace("{END}", ""), MARKED_BETWEEN])
LETTERS = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "ABCD", strict=True)]
PRINTED = "<|im_start|>userA<|im_start|>assistantB</s><|im_start|>userC<|im_start|>assistant"


@between
def test_an_end_that_the_template_prints_between_messages_is_not_repeated(source: str) -> None:
    own = tokenizer("bytes")
    form = ChatFormat(ChatTemplate(source, VARIABLES), own)
    assert own.decode(form.prompt_ids(LETTERS[:3])) == PRINTED
    [(ids, is_target)] = form.encode(LETTERS)
    assert own.decode(ids) == PRINTED + "D</s>"
    assert own.decode(ids[is_target]) == "B</s>D</s>"


@between
def test_an_end_between_messages_has_the_weight_of_its_answer(source: str) -> None:
    own = tokenizer("bytes")
    first, answer, *rest = LETTERS
    [(ids, is_target)] = ChatFormat(ChatTemplate(source, VARIABLES), own).encode([first, answer | {"weight": 0}, *rest])
    assert own.decode(ids) == PRINTED + "D</s>"
    assert own.decode(ids[is_target]) == "D</s>"


def test_a_single_character_or_word_ends_a_turn_by_its_id() -> None:
    source = "{% for m in messages %}{{ m.role + ' ' + m.content + ' # ' }}{% endfor %}"
    words = WordTokenizer(["user", "assistant", "#", "Zq7question", "Zq7answer"])
    assert ChatFormat(ChatTemplate(source), words).end == TurnEnd(" #", stop_id=2)


def test_a_template_that_fails_has_no_end() -> None:
    """Generation without chat does not depend on the template."""
    own = ByteTokenizer()
    for source in ("{{ nothing.at.all }}", "{% if %}", "no messages"):
        own.special = SpecialTokens({"eos_token_id": 3}, {"chat_template": source})
        assert stop_ids(own, DataConfig()) == (3,)


def test_the_end_of_a_turn_comes_before_the_end_of_text() -> None:
    made = added(from_bytes())
    made.special = SpecialTokens({"eos_token_id": [256, 257]}, {"chat_template": PLAIN})
    assert stop_ids(made, DataConfig()) == (259, 256, 257)
    assert made.eos_id == 256, "documents still end with the end of text"


TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson(ensure_ascii=true) + '</call>' }}{% endfor %}"
    "{{ (m.content or '') + '<|im_end|>\n' }}{% endfor %}" + START
)
# Marks around the content only.
MARKED_TOOLS = TOOLS.replace(
    "{{ (m.content or '') + '",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{{ '",
)


@pytest.mark.parametrize("marked", [False, True])
def test_calls_of_tools_are_answers(marked: bool) -> None:
    own = ChatFormat(ChatTemplate(MARKED_TOOLS if marked else TOOLS), tokenizer("bytes"))
    arguments = {"name": "<|im_end|>", "é": "</s>"}
    call = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
    messages = [user("Now?"), call, {"role": "tool", "content": "12 <|im_end|>"}, assistant("Noon.")]
    tools = [{"name": "f", "description": "ends with <|im_end|>"}]
    [encoded] = own.encode(messages, tools)
    call_text = f"<call>{json.dumps({'name': 'f', 'arguments': arguments})}</call>"
    expected = "<|im_end|>Noon.<|im_end|>" if marked else f"{call_text}<|im_end|>Noon.<|im_end|>"
    assert own.tokenizer.decode(encoded.ids[encoded.is_target]) == expected
    assert call_text in own.tokenizer.decode(encoded.ids)
    assert controls(encoded.ids, "bytes")["<|im_end|>"] == 4
    assert own.prompt_ids(messages[:3], tools) == encoded.ids[: -len("Noon.") - 1].tolist()


def test_a_message_of_weight_0_is_no_target() -> None:
    messages = [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]
    for name in ("plain", "marked", "marks", "no end"):
        assert said(form(name, "bytes"), messages)[0] in ("Bye.<|im_end|>", "Bye.</s>")


# Marks, and a text that only the last answer has: earlier turns are not found in the whole conversation.
CHANGING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ ('!' if loop.last else '') + m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)


def test_a_message_of_weight_0_is_no_target_if_the_template_changes_earlier_text() -> None:
    own = ChatFormat(ChatTemplate(CHANGING), tokenizer("bytes"))
    assert said(own, LETTERS) == ["B<|im_end|>D<|im_end|>"]
    assert said(own, [LETTERS[0], LETTERS[1] | {"weight": 0}, *LETTERS[2:]]) == ["D<|im_end|>"]


def test_a_message_of_weight_0_that_cannot_be_located_is_an_error() -> None:
    source = CHANGING.replace(
        "m.content + '<|im_end|>' }}", "m.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}"
    )
    own = ChatFormat(ChatTemplate(source), tokenizer("bytes"))
    with pytest.raises(
        UserError, match=r"message 2 has the weight 0, but its text cannot be located: .* 4 texts of 2 answers"
    ):
        own.encode([LETTERS[0], LETTERS[1] | {"weight": 0}, *LETTERS[2:]])


def test_reasoning_is_a_target_and_begins_a_sequence() -> None:
    """The template removes reasoning from earlier answers, so each answer is trained as the last message."""
    own = form("think", "bytes")
    turns = [
        user("hi"),
        assistant("<think>\nA.\n</think>\n\nhello"),
        user("bye"),
        assistant("<think>\nB.\n</think>\n\nciao"),
    ]
    one, two = own.encode(turns)
    assert said(own, turns) == ["<think>\nA.\n</think>\n\nhello<|im_end|>", "<think>\nB.\n</think>\n\nciao<|im_end|>"]
    assert own.tokenizer.decode(two.ids[~two.is_target]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert own.prompt_ids(turns[:1]) == one.ids[~one.is_target].tolist()
    assert own.prompt_ids(turns[:3]) == two.ids[~two.is_target].tolist()
    # A block that the assistant wrote is a target.
    assert said(own, [user("hi"), assistant("<think>\n\n</think>\n\nhello")]) == [
        "<think>\n\n</think>\n\nhello<|im_end|>"
    ]


def test_white_space_of_the_template_is_not_repeated() -> None:
    """The model generates the space before its answer; the next prompt has it once."""
    source = "{% for m in messages %}{{ m.role + ':' + (' ' if m.role == 'assistant' else '') + m.content + ' </s>' }}"
    source += "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    own = ChatFormat(ChatTemplate(source), tokenizer("bytes"))
    [encoded] = own.encode([user("hi"), assistant("hello")])
    generated = own.tokenizer.decode(encoded.ids[encoded.is_target][:-1])
    assert generated == " hello "
    history = [user("hi"), assistant(own.content(generated)), user("bye")]
    assert own.prompt_ids(history)[: len(encoded.ids)] == encoded.ids.tolist()
    assert form("no end", "bytes").content("a ") == "a "


def test_a_variable_moves_the_think_block_into_the_prompt() -> None:
    own = ChatFormat(ChatTemplate(THINK, VARIABLES | {"enable_thinking": False}), tokenizer("bytes"))
    turns = [user("hi"), assistant("hello"), user("bye"), assistant("ciao")]
    block = "<think>\n\n</think>\n\n"
    assert (
        own.tokenizer.decode(own.prompt_ids(turns[:1]))
        == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{block}"
    )
    assert said(own, turns) == ["hello<|im_end|>", "ciao<|im_end|>"]
    assert [each.ids[: -len("hello") - 1].tolist() for each in own.encode(turns[:2])] == [own.prompt_ids(turns[:1])]


# As in Qwen 3.5: the prompt begins a think block; earlier answers have no block.
OPENED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- (m.content or '') + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


def test_the_end_of_a_think_block_that_the_prompt_begins_is_a_target() -> None:
    own = ChatFormat(ChatTemplate(OPENED), tokenizer("bytes"))
    assert said(own, TALK) == ["\n</think>\n\nHello. Zażółć 👋<|im_end|>", "\n</think>\n\nBye.<|im_end|>"]
    assert said(own, [user("hi"), assistant("hello", reasoning="hm")]) == ["hm\n</think>\n\nhello<|im_end|>"]
    assert own.added_target == "\n</think>\n\n"
    assert form("think", "bytes").added_target == ""


def test_a_prompt_without_its_answers_is_named() -> None:
    """In DeepSeek R1, for example, the prompt begins a think block, and no answer has the block."""
    source = TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    own = ChatFormat(ChatTemplate(source), tokenizer("bytes"))
    with pytest.raises(
        UserError, match=r"chat sends '<\|im_start\|>assistant\\n<think>\\n' before an answer, .* set a variable"
    ):
        own.encode(TALK)


def test_a_system_message_that_the_template_writes_only_before_the_last_request_is_trained_on() -> None:
    """In Mistral 7B v0.3, the system message is in the text that chat sends, but not in the complete conversation."""
    source = (
        "{% set system = messages[0].content + '\n' if messages[0].role == 'system' else '' %}<s>{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
    )
    own = ChatFormat(ChatTemplate(source), tokenizer("bytes"))
    messages = [{"role": "system", "content": "Be."}, user("a"), assistant("b"), user("c"), assistant("d")]
    sequences = own.encode(messages)
    assert [own.tokenizer.decode(each.ids) for each in sequences] == [
        "<s>[INST] Be.\na[/INST] b</s>",
        "<s>[INST] a[/INST] b</s>[INST] Be.\nc[/INST] d</s>",
    ]
    assert said(own, messages) == [" b</s>", " d</s>"]
    for n, each in zip((2, 4), sequences, strict=True):
        assert each.ids[~each.is_target].tolist() == own.prompt_ids(messages[:n])


def test_marked_text_after_the_end_of_a_turn_is_not_a_target() -> None:
    """The template changes earlier text, so that the turns are not found in the whole conversation."""
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{% if loop.last %}{{ '!' }}{% endif %}"
    own = ChatFormat(
        ChatTemplate(source + "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% endfor %}"), tokenizer("bytes")
    )
    [encoded] = own.encode(TALK[:2])
    after = own.tokenizer.library.token_to_id("<|im_end|>")  # type: ignore[attr-defined]
    ends = np.flatnonzero(encoded.ids[:-1] == after)
    assert encoded.is_target[ends].all()
    assert not encoded.is_target[ends + 1].any()


def unknown(kind: str) -> SubwordTokenizer:
    """A tokenizer in which characters other than a, b and white space are unknown, and the unknown token is special."""
    words = ["[UNK]", "a", "b", "\u2581", "\u2581a"]
    if kind == "unigram":
        library = HFTokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
        library.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        library = HFTokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens([AddedToken("[UNK]", special=True)])
    return added(library)


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
@pytest.mark.parametrize("name", ["plain", "llama-2", "zephyr"])
def test_unknown_characters_are_text(name: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    made = unknown(kind)
    template = (PUBLISHED | {"plain": PLAIN})[name]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=HFTokenizer.from_str(made.to_json()))
    own = ChatFormat(ChatTemplate(template, VARIABLES), made)
    messages = [user("a中b\n"), assistant("b a"), user("ab 中")]
    text = own.template.render(messages).text
    assert own.prompt_ids(messages) == theirs.encode(text, add_special_tokens=False)


def test_an_answer_has_no_added_space_if_line_breaks_become_spaces() -> None:
    """The usual normalizer of SentencePiece replaces line breaks. Here, the line break is the space before the answer."""
    words = ["[UNK]", "\u2581", "\u2581a", "\u2581b", *"abcdefghijklmnopqrstuvwxyz"]
    scores = [-1.0, -2.0, -2.5, -2.5, *[-3.0] * 26]
    library = HFTokenizer(models.Unigram(list(zip(words, scores, strict=True)), unk_id=0))
    library.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    made = added(library)
    own = ChatFormat(ChatTemplate(PLAIN), made)
    for answer in ("ab ab", "ab\nab", "b"):
        talk = [user("a"), assistant(answer)]
        [(ids, _)] = own.encode(talk)
        prompt = own.prompt_ids(talk[:1])
        assert ids[: len(prompt)].tolist() == prompt
        text = own.template.render(talk, add_generation_prompt=False).text
        assert made.decode(ids) == made.decode(made.encode_special(text)).rstrip()


def test_tokens_absorb_the_white_space_after_them_between_turns() -> None:
    transformers = pytest.importorskip("transformers")
    made = added(from_bytes(), rstrip=True)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=HFTokenizer.from_str(made.to_json()))
    own = ChatFormat(ChatTemplate(PLAIN), made)
    text = own.template.render(TALK[:3]).text
    assert own.prompt_ids(TALK[:3]) == theirs.encode(text, add_special_tokens=False)


def test_text_that_the_template_adds_to_each_answer_is_trained_and_reported() -> None:
    source = PLAIN.replace("m.content", "('<|eot_id|>' if m.role == 'assistant' else '') + m.content")
    own = ChatFormat(ChatTemplate(source), tokenizer("bytes"))
    assert own.frame.kept_opening == "<|eot_id|>"
    assert said(own, TALK[:2]) == ["<|eot_id|>Hello. Zażółć 👋<|im_end|>"]


def test_a_format_has_the_variables_of_the_run_and_of_the_caller() -> None:
    made = added(from_bytes())
    made.special = SpecialTokens(
        {"eos_token_id": 257}, {"chat_template": "{{ a }} {{ b }} {{ bos_token }}", "bos_token": "B"}
    )
    settings = DataConfig(chat_template_kwargs='{"a": 1, "b": 2}')
    own = chat_format(made, settings, {"b": 3})
    assert own is not None
    assert made.decode(own.prompt_ids([user("x")])) == "1 3 B"
    assert chat_format(ByteTokenizer(), settings) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1]", "must be an object"),
        ("{", "data.chat_template_kwargs: not valid JSON"),
        ('{"messages": []}', "'messages' cannot be set as a variable of a template"),
    ],
)
def test_invalid_variables_are_one_line(value: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        DataConfig(chat_template_kwargs=value)
    assert "\n" not in str(caught.value)
