"""Chat templates: the same text as in transformers, and malicious templates."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.files.lenient_json import Twice
from jaxgpt.data.tokenizers.base import ByteTokenizer
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
# An agent's format: messages sliced in a block, defaults of variables, and calls and reasoning inside {% generation %}.
AGENT = """{#- comment -#}
{{- "〈|EOS|〉" -}}
{%- set enable_thinking = enable_thinking | default(false) -%}
{%- set add_generation_prompt = add_generation_prompt | default(false) -%}
{%- set system = "Be kind." -%}
{%- if messages and messages[0].role == "system" -%}{%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- set ns = namespace(tools="<available_tools>\n") -%}
{%- for tool in tools or [] -%}{%- set ns.tools = ns.tools ~ (tool | tojson) ~ "\n" -%}{%- endfor -%}
{%- if system and system.strip() -%}{{- "<system>" + system.rstrip() + ns.tools + "</system>\n" -}}{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "assistant" -%}
    {%- generation -%}
      {{- "<assistant>" -}}
      {%- set reasoning = message.reasoning if message.reasoning is string else message.reasoning_content or "" -%}
      {{- "<think>" + reasoning + "</think>" if enable_thinking else "</think>" -}}
      {{- content -}}
      {%- for call in message.tool_calls or [] -%}
        {{- "<tool_call>" + call.function.name }}
        {% set _args = call.function.arguments %}
        {%- for k, v in _args.items() -%}
          {{- "<arg_key>" ~ k ~ "</arg_key>" -}}
          {{- "<arg_value>"}}{{ v | tojson(ensure_ascii=False) if v is not string else v }}{{ "</arg_value>" -}}
        {%- endfor -%}
        {{- "</tool_call>" -}}
      {%- endfor -%}
      {{- "</assistant>\n" -}}
    {%- endgeneration -%}
  {%- else -%}{{- "<" + message.role + ">" + content + "</" + message.role + ">\n" -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{{- "<think>" if enable_thinking else "</think>" -}}{%- endif -%}"""
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


@pytest.mark.parametrize("name", [*PUBLISHED, "marked", "language", "agent"])
def test_text_is_rendered_as_by_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (PUBLISHED | {"marked": MARKED, "language": LANGUAGE, "agent": AGENT})[name]
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


CALL = {"function": {"name": "f", "arguments": {"city": "Łódź", "days": 2, "units": {"wind": "m/s"}}}}
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning": "Look it up.", "tool_calls": [CALL]},
    {"role": "tool", "content": "3 °C"},
    {"role": "assistant", "content": "Cold."},
]


@pytest.mark.parametrize("thinking", [True, False])
def test_an_agent_s_calls_are_rendered_as_by_transformers(thinking: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "f"}}]
    ours = ChatTemplate(AGENT, {"enable_thinking": thinking}).render(CALLS, tools=tools)
    [theirs], [spans] = utils.render_jinja_template(
        [CALLS],
        tools=tools,
        chat_template=AGENT,
        add_generation_prompt=True,
        return_assistant_tokens_mask=True,
        enable_thinking=thinking,
    )
    assert ours.text == theirs
    assert ours.spans == list(map(tuple, spans))


# Functions and filters of transformers, with their arguments by name and by position.
EXPRESSIONS = (
    "{{ {'b': 'é', 'a': [1, 2]} | tojson(true) }}",
    "{{ {'b': 'é', 'a': [1, 2]} | tojson(false, 2) }}",
    "{{ {'b': 'é', 'a': [1, 2]} | tojson(false, none, (',', ':'), true) }}",
    "{{ {'b': 'é', 'a': [1, 2]} | tojson(indent=4, sort_keys=true, separators=(', ', '=')) }}",
    "{% set d = dict.fromkeys(['a', 'b'], 1) %}{{ d.a }}{{ dict(x=1).x }}{{ dict([('y', 2)]).y }}",
    "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.self }}{{ ns.b }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{{ strftime_now('%Y') | length }}",
)


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_expressions_are_rendered_as_by_transformers(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [theirs], _ = utils.render_jinja_template([TALK], chat_template=source)
    assert ChatTemplate(source).render(TALK).text == theirs


HOSTILE = {
    "{% set ns = namespace(_x=1) %}": "a namespace has no attribute '_x'",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}": "a namespace has no attribute '__class__'",
    "{{ [] | tojson(default=raise_exception) }}": "unexpected keyword argument 'default'",
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
        ([{"role": "", "content": "x"}], "message 1 needs a role such as user"),
        ([{"content": "x"}], "message 1 needs a role such as user"),
        ([*TALK, {"role": "user"}], "message 5 needs a content, a string or a list of parts"),
        ([*TALK, {"role": "assistant", "content": None}], "message 5 needs a content"),
        ([*TALK, {"role": "user", "content": 1}], "message 5 needs a content"),
        ([["user", "Hi"]], "message 1 must have a role and a content"),
    ],
)
def test_malformed_messages_are_named(messages: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ChatTemplate(CHATML).render(messages)


def test_the_template_decides_about_roles_tools_and_calls() -> None:
    """Roles, tools, calls without content and parts reach the template as they are."""
    source = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{{ (m.content or [])|map(attribute='text')|join }}{% endif %};"
        "{% endfor %}"
    )
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<é>"}}}]},
        {"role": "tool", "content": "1"},
    ]
    rendered = ChatTemplate(source).render(messages, tools=[{"name": "f"}])
    assert rendered.text == 'f;developer:ab;assistant:{"x": "<é>"};tool:1;'


@pytest.mark.parametrize("source", [CHATML, "{% for m in messages %}{{ m.content.strip() }}{% endfor %}"])
def test_a_call_without_content_names_tools_if_the_template_reads_its_content(source: str) -> None:
    call = {"role": "assistant", "tool_calls": [CALL]}
    with pytest.raises(
        UserError, match="content of message 2, which has only tool_calls; use a template that supports tools"
    ):
        ChatTemplate(source, VARIABLES).render([{"role": "user", "content": "Hi"}, call])


def test_a_value_of_a_key_that_is_given_twice_is_not_printed() -> None:
    message = {"role": "user", "content": "Hi", "name": Twice()}
    assert ChatTemplate("{{ messages[0].content }}").render([message]).text == "Hi"
    with pytest.raises(UserError, match="the chat template cannot render these messages: a key is given twice"):
        ChatTemplate("{{ messages[0].name }}").render([message])


def test_a_variable_reaches_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ depth.most }}", {"enable_thinking": False, "depth": {"most": 3}})
    assert template.render(TALK).text == "False 3"


@pytest.mark.parametrize("name", ["text", "thinking"])
def test_null_fields_and_reasoning_are_as_in_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sources = {
        "text": "{% for m in messages %}{{ m.role }}:{{ m.content }};{{ m.name }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}",
        "thinking": "{% for m in messages %}{{ m.role }}:{{ m.thinking }};{{ m.reasoning_content }}{% endfor %}",
    }
    messages = [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "5", "tool_calls": None},
        {"role": "assistant", "content": "Five.", "reasoning": "Hm."},
    ]
    library = Tokenizer.from_str(ByteTokenizer().to_json())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, chat_template=sources[name])
    rendered = ChatTemplate(sources[name]).render(messages, add_generation_prompt=False)
    assert rendered.text == theirs.apply_chat_template(messages, tokenize=False)


ROLE = "{% for m in messages %}{{ m.role + ':' }}"
CONTENTS = {
    "only parts": ROLE
    + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}",
    "first part": ROLE + "{{ m.content[0]['text'] }};{% endfor %}",
    "only text": ROLE + "{{ m.content }};{% endfor %}",
    "concatenated": ROLE + "{{ m.content + ';' }}{% endfor %}",
    "both": ROLE
    + "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %};{% endfor %}",
}


@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}]])
@pytest.mark.parametrize("name", CONTENTS)
def test_a_template_receives_the_form_of_content_that_it_reads(name: str, content: Any) -> None:
    assert ChatTemplate(CONTENTS[name]).render([{"role": "user", "content": content}]).text == "user:Hi;"


def test_parts_other_than_text_stay_parts() -> None:
    image = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    assert (
        ChatTemplate(ROLE + "{{ m.content | length }}{% endfor %}").render([{"role": "user", "content": image}]).text
        == "user:2"
    )
