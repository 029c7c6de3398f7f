"""The lines of a chat that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from tp_runtime.errors import InvalidRequestError
from tp_runtime.launch.chat_conversation import SYSTEM, Conversation

COMMANDS = {
    "/help": "this list",
    "/reset": "forget what was said; system message and parameters stay",
    "/params": "show the parameters; /params NAME VALUE sets one (VALUE none: its default)",
    "/system": "set the system message; without text: none",
    "/quit": "leave; so does Ctrl-D",
}
_ALSO = {"/exit": "/quit", "/q": "/quit", "/?": "/help", "/set": "/params"}
_KEYS = (
    "Ctrl-C stops an answer. Alt-Enter begins a new line in your message, the arrow keys bring "
    "back earlier ones. A message that begins with a slash is sent with two of them."
)

Say = Callable[[str], None]


def is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def run_command(line: str, conversation: Conversation, say: Say) -> bool:
    """Do what the line asks and say so; False: leave the chat.

    Raises InvalidRequestError, one sentence, when that cannot be done."""
    name, _, rest = line.strip().partition(" ")
    name, rest = _ALSO.get(name, name), rest.strip()
    if name == "/quit":
        return False
    if name == "/help":
        say("\n".join([*_table(list(COMMANDS.items())), _KEYS]))
    elif name == "/reset":
        conversation.reset()
        say("A new conversation.")
    elif name == "/system":
        conversation.set(SYSTEM, rest or "none")
        say("System message set." if rest else "No system message.")
    elif name == "/params":
        _params(rest, conversation, say)
    else:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands."
        raise InvalidRequestError(f"There is no command {name}; {hint}")
    return True


def _params(rest: str, conversation: Conversation, say: Say) -> None:
    if rest:
        name, value = _assignment(rest, conversation)
        conversation.set(name, value)
    shown = [
        (name, value + (" (set)" if is_set else ""))
        for name, value, is_set in conversation.settings()
        if not rest or name == _assignment(rest, conversation)[0]
    ]
    say("\n".join(_table(shown)))


def _assignment(text: str, conversation: Conversation) -> tuple[str, str]:
    """NAME VALUE, NAME=VALUE or NAME = VALUE."""
    name, _, value = text.replace("=", " ", 1).partition(" ")
    name, value = name.strip().replace("-", "_"), value.strip()
    if not value:
        raise InvalidRequestError(
            f"/params takes a name and a value, as in /params temperature 0.2; there is no value "
            f"in {text!r}."
        )
    return name, value


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]
