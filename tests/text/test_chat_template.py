"""Chat templates against transformers' rendering of the same template."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.text.small_tokenizers import byte_level, write_folder
from tp_runtime.errors import ConfigError, InvalidRequestError
from tp_runtime.text.chat_template import ChatTemplate
from tp_runtime.text.tokenizer import Tokenizer

FULL = """\
{%- if tools %}
    {{- bos_token + 'tools:' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
        {{- tool | tojson(indent=2, sort_keys=true) }}
    {%- endfor %}
{%- endif %}
{% set ns = namespace(last=-1) %}
{% for message in messages %}
    {% if message.role == 'user' %}
        {% set ns.last = loop.index0 %}
    {% endif %}
{% endfor %}
{% for message in messages %}
    {% if message['role'] == 'skipped' %}
        {% continue %}
    {% endif %}
    {% if message['role'] == 'stop' %}
        {% break %}
    {% endif %}
    {% if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{ raise_exception('Unknown role ' + message.role + '.') }}
    {% endif %}
<|im_start|>{{ message.role }}{{ '*' if loop.index0 == ns.last }}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content.strip() }}{% endgeneration %}
        {% for call in message.tool_calls or [] %}
            {% set call = call.function if call.function else call %}
<call>{{ call.name }} {{ call.arguments | tojson }}</call>
        {% endfor %}
    {% else %}
{{ message.content }}
    {% endif %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
    {% if enable_thinking is defined and enable_thinking is false %}
<think></think>
    {% endif %}
{% endif %}"""

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Kraków <b>"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&'\"</b> 你好 👍"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "  2\n"},
        {"role": "skipped", "content": "x"},
        {"role": "user", "content": "and 2+2?  "},
        {"role": "stop", "content": "x"},
        {"role": "user", "content": "never seen"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5 °C"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<i>Wetter ä</i>"}}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path_factory.mktemp("chat"), byte_level(), bos_token="<s>")
    (folder / "chat_template.jinja").write_text(FULL)
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"bos_token": "<other>"}])
def test_renders_as_transformers_does(
    pair: tuple[Tokenizer, Any], chat: Any, tools: Any, arguments: dict[str, Any]
) -> None:
    ours, theirs = pair
    for prompt in (True, False):
        kwargs = {"add_generation_prompt": prompt, **arguments}
        expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False, **kwargs)
        assert ours.render_chat(chat, tools, kwargs) == expected
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render_chat(chat), add_special_tokens=False) == ids


@pytest.mark.parametrize("ending", ["The answer is", "The answer is ", "so:\n"])
def test_the_last_message_can_be_left_open(pair: tuple[Tokenizer, Any], ending: str) -> None:
    ours, theirs = pair
    for role in ("assistant", "user"):
        chat = [{"role": "user", "content": "?"}, {"role": role, "content": ending}]
        expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert ours.render_chat(chat, None, {"continue_final_message": True}) == expected


def test_the_generation_prompt_is_there_unless_refused(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    assert ours.render_chat(CHATS[0]).rstrip().endswith("assistant")
    assert "assistant" not in ours.render_chat(CHATS[0], None, {"add_generation_prompt": False})


def test_template_sources_and_their_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template="config")
    message = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(folder).render_chat(message) == "config"
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render_chat(message) == "file"
    assert tokenizer.render_chat(message, TOOLS) == "tools"


def test_templates_listed_in_the_config(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), chat_template=listed))
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(message) == "a"
    assert tokenizer.render_chat(message, TOOLS) == "b"


def test_a_base_model_says_so_and_suggests_generate() -> None:
    tokenizer = Tokenizer(byte_level(), {}, None)
    with pytest.raises(InvalidRequestError, match=r"base model without a chat template.*generate"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_strftime_now_gives_today() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {})
    years = {str(datetime.now().year)}
    text = template.render([{"role": "user", "content": "x"}])
    assert text in years | {str(datetime.now().year)}


def test_parts_of_text_become_one_text_and_other_parts_are_refused() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    parts: list[dict[str, Any]] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].*'image_url'.*text only"):
        template.render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is a int"),
        ([{"role": "pirate", "content": "x"}], "Unknown role pirate"),
    ],
)
def test_messages_that_cannot_work_are_named(messages: list[Any], expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        ChatTemplate({"default": FULL}, {"bos_token": "<s>"}).render(messages)


def test_messages_of_the_caller_are_not_changed() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    template.render(messages, None, {"continue_final_message": True})
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"unsafe|not safely callable"):
        ChatTemplate({"default": attack}, {}).render([{"role": "user", "content": "x"}])


def test_a_template_that_is_not_jinja_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'default' of this model is not valid Jinja"):
        ChatTemplate({"default": "{% if %}"}, {})


def test_arguments_with_names_of_their_own_are_refused() -> None:
    template = ChatTemplate({"default": "x"}, {})
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError, match="may not hold 'messages'"):
        template.render(message, None, {"messages": []})
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        both = {"continue_final_message": True, "add_generation_prompt": True}
        template.render(message, None, both)
