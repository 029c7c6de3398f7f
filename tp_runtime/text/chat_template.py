"""Chat messages to prompt text through the model's own Jinja template.

The environment is the one that templates are written for (transformers'
`apply_chat_template`): sandboxed and immutable, `trim_blocks`, `lstrip_blocks`, loop controls, a
`generation` block, `raise_exception`, `strftime_now`, and `tojson` without HTML escapes.
Knows nothing of token ids.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tp_runtime.errors import ConfigError, InvalidRequestError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends; its space shows whether the template trims messages."""
_RESERVED = ("messages", "tools")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; the text is
    that of its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template, or several by name ("default", "tool_use").

    `special_tokens` are the names a template may use (`bos_token`, `eos_token`, ...)."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError when a template is not valid Jinja."""
        environment = _environment()
        self._templates = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ConfigError(
                    f"The chat template {name!r} of this model is not valid Jinja: {error}."
                ) from error
        self._special_tokens = dict(special_tokens)
        self._know_tools = {name for name, source in templates.items() if "tools" in source}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; `arguments` are the template's own variables (`enable_thinking`, ...).

        `add_generation_prompt` is true unless given; `continue_final_message=True` leaves the last
        message open, so that the model goes on with it. Raises InvalidRequestError."""
        chat = [_checked_message(i, message) for i, message in enumerate(messages)]
        if not chat:
            raise InvalidRequestError("messages is empty; give at least one message.")
        arguments = dict(arguments or {})
        for name in _RESERVED:
            if name in arguments:
                raise InvalidRequestError(
                    f"chat_template_kwargs may not hold {name!r}; it has an argument of its own."
                )
        goes_on = bool(arguments.pop("continue_final_message", False))
        add_prompt = bool(arguments.pop("add_generation_prompt", not goes_on))
        if goes_on:
            if add_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other; "
                    "give one of them."
                )
            chat[-1] = _with_tag(chat[-1])
        variables = {**self._special_tokens, **arguments}
        text = self._render(chat, tools, add_prompt, variables)
        return _cut_at_tag(text) if goes_on else text

    def _render(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        template = self._choose(bool(tools))
        try:
            return template.render(
                {"documents": None, **variables},
                messages=chat,
                tools=tools,
                add_generation_prompt=add_prompt,
            )
        except Exception as error:  # a template is a program; whatever it raises is about the input
            raise InvalidRequestError(
                f"The model's chat template did not take these messages: {error}"
            ) from error

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            if with_tools and "default" not in self._know_tools:
                raise InvalidRequestError(
                    "The chat template of this model does not know tools; leave tools out."
                )
            return self._templates["default"]
        raise InvalidRequestError(
            "This model has several chat templates and none of them is the default "
            f"({', '.join(sorted(self._templates))}); use generate with a prompt of your own."
        )


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the message with its content as text; raises InvalidRequestError."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is a {type(message).__name__}; it must be a dict.")
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} needs a role (system, user, assistant or tool).")
    checked: dict[str, Any] = copy.deepcopy(dict(message))
    content = message.get("content")
    if isinstance(content, list):
        checked["content"] = "\n".join(_part_text(where, part) for part in content)
    elif content is None:
        if not message.get("tool_calls"):
            raise InvalidRequestError(f"{where} has no content; give a string.")
        checked["content"] = ""  # templates add strings to it
    elif not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content is a {type(content).__name__}; it must be a string or a list of "
            'parts {"type": "text", "text": ...}.'
        )
    return checked


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"{where} has a part of type {kind!r}; this server takes text only.")


def _with_tag(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message["content"] + _CONTINUE_TAG}


def _cut_at_tag(text: str) -> str:
    cut = text.rfind(_CONTINUE_TAG.strip())
    if cut < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message as it is."
        )
    return text[:cut] if text.startswith(_CONTINUE_TAG, cut) else text[:cut].rstrip()
