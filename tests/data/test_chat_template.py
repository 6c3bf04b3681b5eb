"""Chat templates: the same text as in transformers, the assistant's text, and malicious templates."""

from __future__ import annotations

from typing import Any

import pytest

from jaxgpt.data.chat_template import ChatTemplate
from jaxgpt.data.tokenizer import ByteTokenizer, encode_spans
from jaxgpt.errors import UserError

# Formats of published models; the templates were written for this test.
CHATML = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\n' + default + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' %}
{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{% for m in turns %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') }}
{{- m['content'] | trim }}
{{- ' [/INST]' }}{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
LLAMA3 = """{{- bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
{{- m['content'] | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
ZEPHYR = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token + '\n' }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}
{%- endif %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LANGUAGE = """{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}{{ m | tojson }}
{{- {'b': 1, 'a': '<é>'} | tojson(indent=2) }}
  {% set found = namespace(n=0) %}
  {% for c in m.content %}{% set found.n = found.n + 1 %}{% endfor %}
{{ found.n }}{{ '%s-%d' | format(m.role, 3) }}{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a') }}{% endfor %}"""

PUBLISHED = {"chatml": CHATML, "llama-2": LLAMA2, "llama-3": LLAMA3, "zephyr": ZEPHYR, "gemma": GEMMA}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "default": "Be kind."}
TALK = [
    {"role": "user", "content": 'Hi <there> & "you"\n'},
    {"role": "assistant", "content": "Hello. Zażółć 👋"},
    {"role": "user", "content": "  And now? "},
    {"role": "assistant", "content": "Bye."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("name", [*PUBLISHED, "marked", "language"])
def test_text_is_rendered_as_by_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (PUBLISHED | {"marked": MARKED, "language": LANGUAGE})[name]
    template = ChatTemplate(source, VARIABLES)
    talks = [TALK[:n] for n in (1, 2, 3, 4)] + ([] if name == "gemma" else [[SYSTEM, *TALK[:3]]])
    for talk in talks:
        for prompt in (True, False):
            ours = template.render(talk, add_generation_prompt=prompt)
            theirs, spans = utils.render_jinja_template(
                [talk],
                chat_template=source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=True,
                **VARIABLES,
            )
            assert ours.text == theirs[0]
            assert ours.spans == list(map(tuple, spans[0]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chatml", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
        ("llama-2", [" Hello. Zażółć 👋 </s>", " Bye. </s>"]),
        ("llama-3", ["Hello. Zażółć 👋<|eot_id|>", "Bye.<|eot_id|>"]),
        ("zephyr", ["Hello. Zażółć 👋</s>", "Bye.</s>"]),
        ("gemma", ["Hello. Zażółć 👋<end_of_turn>", "Bye.<end_of_turn>"]),
        ("marked", ["Hello. Zażółć 👋<|im_end|>", "Bye.<|im_end|>"]),
    ],
)
def test_the_assistants_text_is_located(name: str, said: list[str]) -> None:
    text, spans = ChatTemplate((PUBLISHED | {"marked": MARKED})[name], VARIABLES).assistant_spans(TALK)
    assert [text[a:b] for a, b in spans] == said


def test_an_empty_answer_has_an_empty_span() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    talk = [TALK[0], {"role": "assistant", "content": ""}, *TALK[2:]]
    rendered = ChatTemplate(template).assistant_spans(talk)
    begin, end = rendered.spans[0]
    assert begin == end
    ids, trained = encode_spans(ByteTokenizer(), *rendered)
    assert (bytes(ids.tolist()).decode(), trained.sum()) == (rendered.text, len("Bye."))


HOSTILE = {
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{{ messages.append(1) }}": "unsafe",
    "{{ 'a' * 10 ** 8 }}": "the result has more than 16,777,216 characters",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages }}{% endfor %}{% endfor %}": "the result has more",
    "{{ raise_exception('two\nlines') }}": "cannot render these messages",
    "{% if %}": "has an error: line 1",
    "{{ nothing.at.all }}": "undefined",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_one_line(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(UserError, match=HOSTILE[source]) as caught:
        template.render(TALK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages must be a list"),
        ("Hi", "messages must be a list"),
        ([{"role": "bot", "content": "x"}], "message 1 has the role 'bot': use one of system, user, assistant, tool"),
        ([*TALK, {"role": "user"}], "message 5 needs a role and a content"),
        ([["user", "Hi"]], "message 1 needs a role and a content"),
    ],
)
def test_malformed_messages_are_named(messages: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ChatTemplate(CHATML).render(messages)
