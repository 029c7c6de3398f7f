"""What a chat consists of: the messages so far and the parameters of the next answer.

Plain state with rules; knows neither terminals nor servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tp_runtime.client_arguments import sampling_params
from tp_runtime.errors import InvalidRequestError
from tp_runtime.sampling_params import SamplingParams

SYSTEM = "system"
"""The one parameter that is not a sampling parameter: the text of the system message."""
_FOR_SEVERAL = ("n", "logprobs", "prompt_logprobs", "skip_special_tokens")
"""Sampling parameters that mean nothing where one answer is shown as text."""
_UNSET = ("none", "null", "default", "off")


class Conversation:
    """`parameters` are those that were set; everything else has SamplingParams' default."""

    def __init__(self, system: str = "", parameters: Mapping[str, Any] | None = None) -> None:
        self._turns: list[dict[str, Any]] = []
        self._system = system
        self.parameters: dict[str, Any] = dict(parameters or {})
        self.params()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As the chat template takes them."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    @property
    def has_turns(self) -> bool:
        return bool(self._turns)

    def params(self) -> SamplingParams:
        """For the next answer; raises InvalidRequestError when they exclude each other."""
        return sampling_params(None, self.parameters)

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """The answer, or the part of it that came; nothing at all takes the question back."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> None:
        """Forget a question that got no answer."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()

    def reset(self) -> None:
        """Forget what was said; the system message and the parameters stay."""
        self._turns.clear()

    def set(self, name: str, value: str) -> None:
        """Set a parameter from what was typed; "none" takes its setting away.

        Raises InvalidRequestError, and changes nothing then."""
        if name == SYSTEM:
            self._system = "" if value.lower() in _UNSET else value
            return
        if name in _FOR_SEVERAL:
            raise InvalidRequestError(
                f"{name} cannot be set here: a chat shows one answer as text."
            )
        changed = dict(self.parameters)
        if value.lower() in _UNSET:
            if name not in SamplingParams.__struct_fields__:
                sampling_params(None, {name: None})  # raises, naming what is close
            changed.pop(name, None)
        else:
            changed[name] = _parsed(value)
        sampling_params(None, changed)
        self.parameters = changed

    def settings(self) -> list[tuple[str, str, bool]]:
        """Name, value as it can be typed, and whether it was set, of everything `set` takes."""
        current = msgspec.structs.asdict(self.params())
        listed = [(SYSTEM, self._system or "none", bool(self._system))]
        for name, value in current.items():
            if name not in _FOR_SEVERAL:
                shown = "none" if value is None else json.dumps(msgspec.to_builtins(value))
                listed.append((name, shown, name in self.parameters))
        return listed


def _parsed(text: str) -> Any:
    """A number, list or object where it reads as one, the text itself otherwise."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict):  # logit_bias: JSON has no integer keys
        return {int(key) if key.lstrip("-").isdigit() else key: v for key, v in value.items()}
    return value
