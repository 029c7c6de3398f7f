"""The command `tp-runtime chat`: a conversation with a model, in a terminal.

It starts a server of its own for MODEL, or talks to one that runs. What is said is kept here and
sent again with every question; the server's prefix cache makes that cheap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tp_runtime.errors import (
    ConfigError,
    InvalidRequestError,
    ServerUnavailableError,
    TPRuntimeError,
    WorkerFailedError,
)
from tp_runtime.launch import exit_status
from tp_runtime.launch.chat_commands import is_command, run_command
from tp_runtime.launch.chat_conversation import Conversation
from tp_runtime.launch.chat_terminal import Terminal
from tp_runtime.launch.options import engine_config, engine_options, take_engine_options

if TYPE_CHECKING:
    from tp_runtime.client import Client
    from tp_runtime.engine_config import EngineConfig


@click.command("chat")
@click.argument("model", required=False)
@click.option("--address", default="", help="Of a running server, instead of MODEL.")
@click.option("--system", default="", help="The system message.")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0: greedy.")
@click.option("--top-p", type=float, default=1.0, help="Smallest set of this probability.")
@click.option("--top-k", type=int, default=0, help="Among the k most likely; 0: off.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer; none: what fits.")
@engine_options
@click.pass_context
def chat_command(context: click.Context, /, model: str | None, **options: Any) -> int:
    """Talk to MODEL (a folder or a name on the Hugging Face hub), or to a running server: the one
    at --address, or without either the only one of yours on this machine."""
    address, system = options.pop("address"), options.pop("system")
    settings = take_engine_options(options)
    source = context.get_parameter_source
    given = [name for name in settings if source(name) != click.core.ParameterSource.DEFAULT]
    parameters = {
        name: v for name, v in options.items() if v is not None and _is_set(context, name)
    }
    if "seed" in given:
        parameters["seed"] = settings["seed"]
    conversation = Conversation(system, parameters)
    if model is None:
        _refuse_server_flags([name for name in given if name != "seed"])
    elif address:
        raise ConfigError("Give either a MODEL to start or the --address of a server, not both.")
    config = engine_config(model, settings) if model is not None else None
    with _connected(config, address) as client:
        return Chat(client, conversation, Terminal()).run()


def _is_set(context: click.Context, name: str) -> bool:
    """The temperature has a default of its own here, the others that of SamplingParams."""
    default = click.core.ParameterSource.DEFAULT
    return name == "temperature" or context.get_parameter_source(name) != default


def _refuse_server_flags(names: list[str]) -> None:
    if names:
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(names))
        raise ConfigError(f"{flags} says how to start a server; give the MODEL to start as well.")


@contextmanager
def _connected(config: EngineConfig | None, address: str) -> Iterator[Client]:
    """A client of a server of our own, or of one that runs."""
    if config is None:
        from tp_runtime.client import Client

        with Client(address or None) as client:
            yield client
        return
    from tp_runtime.llm import LLM
    from tp_runtime.model_folder import resolve_model_folder

    folder = resolve_model_folder(config.model)
    refuse_base_model(_has_chat_template(folder), config.model)  # before anything is loaded
    with LLM(**msgspec.structs.asdict(config)) as llm:
        try:
            yield llm.client
        except (ServerUnavailableError, WorkerFailedError):
            llm.raise_if_over()  # the first cause, where one was recorded
            raise


def _has_chat_template(folder: Path) -> bool:
    from tp_runtime.text.tokenizer_files import read_chat_templates, read_settings

    return bool(read_chat_templates(folder, read_settings(folder)))


def refuse_base_model(has_chat_template: bool, model: str) -> None:
    """Raises ConfigError, saying what to do, for a model that is not made for chats."""
    if not has_chat_template:
        raise ConfigError(
            f"{model} has no chat template: it is a base model, which goes on with a text and "
            f'answers nothing; use `tp-runtime generate {model} --prompt "..."`.'
        )


class Chat:
    """One conversation between a person and a server."""

    def __init__(self, client: Client, conversation: Conversation, terminal: Terminal) -> None:
        self._client = client
        self._conversation = conversation
        self._terminal = terminal

    def run(self) -> int:
        """Until the person leaves; returns the exit status."""
        info = self._client.info()
        refuse_base_model(info.has_chat_template, info.model)
        workers = "worker" if info.tensor_parallel_size == 1 else "workers"
        self._terminal.note(
            f"{info.model} on {info.tensor_parallel_size} {info.device} {workers}, "
            f"{info.max_model_len} tokens of context. /help shows the commands, Ctrl-D leaves."
        )
        while True:
            try:
                if not self._turn(self._terminal.read()):
                    return exit_status.OK
            except EOFError:
                return exit_status.OK
            except KeyboardInterrupt:
                self._terminal.note("(Ctrl-D or /quit leaves)")
            except (ServerUnavailableError, WorkerFailedError):
                raise  # nothing can be asked any more
            except TPRuntimeError as error:
                self._terminal.error(str(error))

    def _turn(self, line: str) -> bool:
        """One line of the person; False: leave."""
        if is_command(line):
            return run_command(line, self._conversation, self._terminal.note)
        if line.strip():
            self._answer(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _answer(self, question: str) -> None:
        params = self._conversation.params()
        self._conversation.ask(question)
        answer = _Answer(self._terminal)
        try:
            messages = self._conversation.messages
            with self._client.chat(messages, params, stream=True) as stream:
                for chunk in stream:
                    answer.add(chunk.text, len(chunk.token_ids), chunk.finish_reason)
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"  # leaving the block above has cancelled it
        except TPRuntimeError as error:
            if answer.text:
                self._terminal.write("\n")
            self._conversation.take_back()
            if isinstance(error, InvalidRequestError) and self._conversation.has_turns:
                raise InvalidRequestError(f"{error} /reset begins anew.") from error
            raise
        self._conversation.answered(answer.text)
        self._terminal.write("\n")
        self._terminal.note(answer.summary())


class _Answer:
    """What has come of an answer, and how fast."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._started = time.monotonic()
        self._first = 0.0
        self._last = 0.0
        self._tokens = 0
        self.text = ""
        self.finish_reason: str | None = None

    def add(self, text: str, tokens: int, finish_reason: str | None) -> None:
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._tokens += tokens
        self.text += text
        self.finish_reason = finish_reason
        self._terminal.write(text)

    def summary(self) -> str:
        """Tokens, and per second after the first of them."""
        if not self._tokens:
            return f"[{self.finish_reason or 'nothing'} before the first token]"
        noun = "token" if self._tokens == 1 else "tokens"
        parts = [f"{self._tokens} {noun}", f"the first after {self._first - self._started:.2f} s"]
        if self._tokens > 1 and self._last > self._first:
            rate = (self._tokens - 1) / (self._last - self._first)
            parts.append(f"then {rate:.1f} tokens/s")
        why = {"stopped": "stopped", "length": "cut at the most tokens allowed"}
        if self.finish_reason in why:
            parts.append(why[self.finish_reason])
        return f"[{', '.join(parts)}]"
