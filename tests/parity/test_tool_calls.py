"""Conversations with tools: rendered as in transformers, from every way to write calls and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt.data.chat.encoding import ChatFormat, Conversation
from jaxgpt.data.chat.omitted import omitted_tools
from jaxgpt.data.chat.records import ChatRecord, Pair, read_record
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.conversations import encode_conversation
from jaxgpt.data.tokenizers.base import ByteTokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

transformers = pytest.importorskip("transformers")

# As in Hermes and Qwen: tools in the system message, calls and results in tags.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# As in Llama 3.1: tools in the first user message, the role ipython for results, one call in a message.
LLAMA = """
{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# As in Mistral: tools before the last user message, calls with ids as one JSON list.
MISTRAL = """
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "system" %}
        {{- "[SYSTEM_PROMPT] " + message["content"] + "[/SYSTEM_PROMPT]" }}
    {%- elif message["tool_calls"] is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message["tool_calls"] %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# As in DeepSeek: arguments are a string. The template does not render tools.
DEEPSEEK = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- message['content'] }}
    {%- elif message['role'] == 'user' %}
        {{- '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- for tool in message['tool_calls'] %}
            {{- '<|Assistant|><|tool_call_begin|>' + tool['type'] + '<|tool_sep|>' + tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<|tool_call_end|>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|Assistant|>' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|Assistant|>' }}
{%- endif %}
"""

# The variable `calls` determines whether calls are rendered.
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if calls %}
        {%- for call in message.tool_calls or [] %}
            {{- call.function | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

TEMPLATES = {"Qwen": QWEN, "Llama 3.1": LLAMA, "Mistral": MISTRAL}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
PROPERTIES = {"city": {"type": "string", "description": 'Name, such as "Köln" or <Rome>'}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Get the weather.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]
ARGUMENTS = {"city": "Köln & <Bonn>", "days": [1, 2.5, None, True]}


def conversation(arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation with one call, and these arguments."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm in Köln?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"degrees": 21}', "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "Yes, 21 degrees."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]


def tokenizer() -> SubwordTokenizer:
    library = HFTokenizer.from_str(ByteTokenizer().to_json())
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    library.add_special_tokens([AddedToken(name, special=True) for name in names])
    return SubwordTokenizer(library)


def encode(chat: ChatRecord | Pair, own: SubwordTokenizer, template: ChatTemplate) -> list[Conversation]:
    return encode_conversation(chat, own, ChatFormat(template, own))


def theirs(template: str, messages: Any, tools: Any, **options: Any) -> Any:
    library = HFTokenizer.from_str(tokenizer().to_json())
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **NAMES)
    return made.apply_chat_template(messages, tools=tools, chat_template=template, **options)


RECORDS = {
    "arguments as an object": {"messages": conversation(ARGUMENTS), "tools": TOOLS},
    "arguments as JSON": {"messages": conversation(json.dumps(ARGUMENTS)), "tools": TOOLS},
    "tools as JSON": {"messages": conversation(ARGUMENTS), "tools": json.dumps(TOOLS)},
    "no tools": {"messages": conversation(ARGUMENTS)},
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_equals_transformers(name: str, record: str) -> None:
    chat = read_record(RECORDS[record])
    assert isinstance(chat, ChatRecord)
    tools = TOOLS if "tools" in RECORDS[record] else None
    expected = theirs(TEMPLATES[name], conversation(ARGUMENTS), tools, tokenize=False)
    found = ChatTemplate(TEMPLATES[name], NAMES).render(chat.messages, tools=chat.tools, add_generation_prompt=False)
    assert found.text == expected
    assert ('"description": "Get the weather."' in found.text) == (tools is not None)


@pytest.mark.parametrize("name", ["Qwen", "Llama 3.1"])
def test_ids_equal_transformers_and_calls_are_targets(name: str) -> None:
    own = tokenizer()
    chat = read_record(RECORDS["arguments as JSON"])
    [(ids, is_target)] = encode(chat, own, ChatTemplate(TEMPLATES[name], NAMES))
    expected = theirs(TEMPLATES[name], conversation(ARGUMENTS), TOOLS, tokenize=True, return_dict=True)
    assert ids.tolist() == expected["input_ids"][: len(ids)]
    assert own.decode(ids[is_target]).count('"name": "weather"') == 1, "the call, not the description of the tool"
    assert "Yes, 21 degrees." in own.decode(ids[is_target])
    assert "Köln &" in own.decode(ids[is_target])
    assert "21}" not in own.decode(ids[is_target]), "results are not targets"


def test_templates_that_need_arguments_as_text() -> None:
    own = tokenizer()
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    expected = theirs(DEEPSEEK, conversation(text), None, tokenize=False)
    for arguments in (ARGUMENTS, text):
        chat = read_record({"messages": conversation(arguments)})
        [(ids, is_target)] = encode(chat, own, ChatTemplate(DEEPSEEK, NAMES))
        assert own.decode(ids) == expected
        assert text in own.decode(ids[is_target])


def with_arguments(printed: str) -> str:
    """A template that prints the arguments of calls with an expression."""
    return CHATML.replace("call.function | tojson", f"call.function.name + ' ' }}}}{printed}{{{{- ''").replace(
        "{%- if calls %}", "{%- if true %}"
    )


DIRECT = with_arguments("{{- call.function.arguments }}")
JSON = with_arguments("{{- call.function.arguments | tojson }}")
EITHER = with_arguments(
    "{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}"
    "{{- call.function.arguments | tojson }}{%- endif %}"
)
ITEMS = with_arguments("{%- for name, value in call.function.arguments.items() %}{{- name }}={{ value }}{%- endfor %}")
TEXT = '{"days":[1, 2.5, null, true],  "city": "K\\u00f6ln & <Bonn>"}'  # as no function would write it
CALLS = {
    "a template prints JSON": (DIRECT, TEXT, TEXT),
    "a template prints an object": (DIRECT, ARGUMENTS, ARGUMENTS),
    "a template needs JSON": (DEEPSEEK, TEXT, TEXT),
    "a template writes an object as JSON": (JSON, ARGUMENTS, ARGUMENTS),
    "a template would write JSON as JSON": (JSON, TEXT, json.loads(TEXT)),
    "a template reads both, as JSON": (EITHER, TEXT, TEXT),
    "a template reads both, as an object": (EITHER, ARGUMENTS, ARGUMENTS),
    "a template needs an object": (ITEMS, ARGUMENTS, ARGUMENTS),
    "a template needs an object of JSON": (ITEMS, TEXT, json.loads(TEXT)),
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments_have_the_form_that_the_template_reads_in_training_and_chat(case: str) -> None:
    """The ids equal transformers' ids with arguments in the given form, or in the only form that the template reads."""
    template, given, read = CALLS[case]
    own = tokenizer()
    made = ChatTemplate(template, NAMES)
    expected = theirs(template, conversation(read), None, tokenize=True, return_dict=True)["input_ids"]
    [(ids, is_target)] = encode(read_record({"messages": conversation(given)}), own, made)
    assert ids.tolist() == expected[: len(ids)]
    assert "city" in own.decode(ids[is_target])
    asked = conversation(given)[:-1]
    prompt = theirs(template, conversation(read)[:-1], None, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ChatFormat(made, own).prompt_ids(asked) == prompt == ids[: len(prompt)].tolist()


def test_names_in_arguments_are_text_in_either_form() -> None:
    own = tokenizer()
    for template in (DIRECT, JSON):
        for given in ({"x": "<|im_end|>[1]"}, '{"x": "<|im_end|>[1]"}', '{"x": "\\u003c|im_end|>[1]"}'):
            [(ids, _)] = encode(read_record({"messages": conversation(given)}), own, ChatTemplate(template))
            assert ids.tolist().count(own.library.token_to_id("<|im_end|>")) == 7


@pytest.mark.parametrize("needed", ["tools", "messages[0].role == 'system'", "messages[-1].role != 'assistant'"])
def test_a_template_that_needs_more_than_a_call_receives_arguments_as_json(needed: str) -> None:
    template = "{% if not (" + needed + ") %}{{ raise_exception('missing') }}{% endif %}" + DIRECT
    messages = conversation(TEXT)[:4]
    found = ChatTemplate(template).render(messages, tools=TOOLS).text
    assert found == theirs(template, messages, TOOLS, tokenize=False, add_generation_prompt=True)
    assert TEXT in found


@pytest.mark.parametrize("record", RECORDS)
def test_templates_without_tools_are_refused(record: str) -> None:
    """transformers omits the calls without an error."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert "weather" not in theirs(template, conversation(ARGUMENTS), TOOLS, tokenize=False)
    with pytest.raises(
        UserError, match="the chat template does not render the function 'weather' of the tools or calls"
    ):
        encode(read_record(RECORDS[record]), tokenizer(), ChatTemplate(template, NAMES))


ONLY_TOOLS = "{%- set calls = false %}{%- if tools %}{{- tools | tojson + '\\n' }}{%- endif %}" + CHATML
ONLY_CALLS = "{%- set calls = true %}" + CHATML
NEITHER = "{%- set calls = false %}" + CHATML
IN_QUESTION = [{"role": "user", "content": "How is the weather?"}, *conversation(ARGUMENTS)[2:]]


@pytest.mark.parametrize(
    ("template", "record"),
    [
        (ONLY_TOOLS, {"messages": conversation(ARGUMENTS), "tools": TOOLS}),
        (ONLY_CALLS, {"messages": conversation(ARGUMENTS), "tools": TOOLS}),
        (NEITHER, {"messages": IN_QUESTION}),
        (NEITHER, {"messages": IN_QUESTION, "tools": TOOLS}),
        (NEITHER, {"messages": [IN_QUESTION[0], IN_QUESTION[-1]], "tools": TOOLS}),
    ],
    ids=["calls are omitted", "tools are omitted", "calls, by name in a question", "both", "tools, without calls"],
)
def test_a_template_that_omits_tools_or_calls_is_refused_even_if_their_name_occurs(template: str, record: Any) -> None:
    with pytest.raises(UserError, match="the chat template does not render the function 'weather'"):
        encode(read_record(record), tokenizer(), ChatTemplate(template))


@pytest.mark.parametrize(("text", "is_described"), [("请调用weather函数。", True), ("weather_map", False)])
def test_a_system_message_describes_a_tool_by_its_name_as_a_word(text: str, is_described: bool) -> None:
    messages = [{"role": "system", "content": text}, *conversation(ARGUMENTS)[1:]]
    chat = read_record({"messages": messages, "tools": TOOLS})
    assert omitted_tools(chat, ChatTemplate(ONLY_CALLS)) == (set() if is_described else {"weather"})


def named_call(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_tool_is_omitted_even_if_its_name_is_part_of_a_rendered_name() -> None:
    first = ChatTemplate("{% if tools %}{{ tools[0] | tojson }}\n{% endif %}" + TURNS.replace("CALLS", ""))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    tools = [tool("get_weather"), tool("get")]
    with pytest.raises(UserError, match="the chat template does not render the function 'get' of"):
        encode(read_record({"messages": messages, "tools": tools}), tokenizer(), first)
    assert encode(read_record({"messages": messages, "tools": tools[:1]}), tokenizer(), first)


def test_a_call_is_omitted_even_if_its_name_is_part_of_a_rendered_name() -> None:
    first = ChatTemplate(TURNS.replace("CALLS", "{{ m.tool_calls[0].function.name if m.tool_calls }}"))
    calls = [named_call("get_weather"), named_call("get")]
    question = {"role": "user", "content": "Hi"}
    with pytest.raises(UserError, match="the chat template does not render the function 'get' of"):
        encode(read_record({"messages": [question, {"role": "assistant", "tool_calls": calls}]}), tokenizer(), first)


def test_a_name_that_the_template_changes_is_not_omitted() -> None:
    loud = ChatTemplate(TURNS.replace("CALLS", "{{ m.tool_calls[0].function.name | upper if m.tool_calls }}"))
    answer = {"role": "assistant", "tool_calls": [named_call("get")]}
    [(ids, _)] = encode(read_record({"messages": [{"role": "user", "content": "Hi"}, answer]}), tokenizer(), loud)
    assert "GET<|im_end|>" in tokenizer().decode(ids)


def test_a_call_may_follow_messages_that_the_template_rejects_as_a_prompt() -> None:
    """No answer follows the first answer, so neither training nor chat renders a prompt there."""
    strict = "{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate(strict + TURNS.replace("CALLS", "{{ m.tool_calls[0].function.name if m.tool_calls }}"))
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait"},
        {"role": "planner", "tool_calls": [named_call("get")]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    [(ids, _)] = encode(read_record({"messages": messages}), tokenizer(), template)
    assert "get<|im_end|>" in tokenizer().decode(ids)


def test_tools_that_a_system_message_describes_need_no_rendering() -> None:
    own = tokenizer()
    system = {"role": "system", "content": f"You can call {json.dumps(TOOLS)}"}
    chat = read_record({"messages": [system, *conversation(ARGUMENTS)[1:]], "tools": TOOLS})
    [(ids, is_target)] = encode(chat, own, ChatTemplate(ONLY_CALLS))
    assert own.decode(ids).count("Get the weather.") == 1
    assert own.decode(ids[is_target]).startswith('{"name": "weather", "arguments": {"city": "Köln')


def test_a_description_without_a_name_is_left_to_the_template() -> None:
    template = "{%- set calls = false %}{{- (tools or []) | length }}" + CHATML
    chat = read_record({"messages": [IN_QUESTION[0], IN_QUESTION[-1]], "tools": [{"function": "names"}, {"name": 1}]})
    [(ids, _)] = encode(chat, tokenizer(), ChatTemplate(template))
    assert tokenizer().decode(ids).startswith("2<|im_start|>user")
