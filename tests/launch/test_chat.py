"""`tp-runtime chat` in a pseudo terminal, as a person uses it; one server for the module."""

from __future__ import annotations

import os
import re
import sys
import time

import pexpect
import pytest

from tests.launch.processes import ROOT, SMALL, TP_RUNTIME, program
from tests.tiny_models import make_tiny
from tp_runtime import LLM
from tp_runtime.errors import ConfigError, InvalidRequestError
from tp_runtime.launch import exit_status
from tp_runtime.launch.chat import refuse_base_model
from tp_runtime.launch.chat_commands import run_command
from tp_runtime.launch.chat_conversation import Conversation


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny("qwen3", folder, max_position_embeddings=40_000, num_hidden_layers=1)
    with LLM(folder, device="cpu", cpu_kv_cache_gib=0.1) as llm:
        yield llm.client


class Person:
    """Types into the program and reads its screen."""

    def __init__(self, address: str, *flags: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # there is no terminal that could answer
        }
        command = [*TP_RUNTIME[1:], "chat", "--address", address, *flags]
        self.child = pexpect.spawn(
            sys.executable,
            command,
            env=environment,
            timeout=30,
            encoding="utf-8",
            dimensions=(40, 100),
            use_poll=True,  # select() takes no descriptor above 1,023
        )
        self.child.expect("Ctrl-D leaves")
        self.prompt()

    def prompt(self) -> str:
        """Wait until the program asks for a line; what it showed before."""
        # Pasting is switched on (2004) and the cursor shown (25) once a line can be typed.
        self.child.expect(r"\x1b\[\?2004h.*?\x1b\[\?25h")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.child.before)

    def type(self, line: str) -> None:
        self.child.send(line + "\r")

    def says(self, line: str) -> str:
        self.type(line)
        return self.prompt()

    def status(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def chat(server):
    people = []

    def start(*flags: str) -> Person:
        people.append(Person(server.address, *flags))
        return people[-1]

    yield start
    for person in people:
        person.child.close(force=True)


def test_an_answer_streams_and_tells_its_speed(chat, server):
    person = chat("--temperature", "0", "--max-tokens", "12")
    shown = person.says("Hello")
    assert re.search(r"\[\d+ tokens, the first after \d+\.\d\d s, then [\d.]+ tokens/s", shown)
    messages = [{"role": "user", "content": "Hello"}]
    expected = server.chat(messages, temperature=0.0, max_tokens=12).text
    visible = "".join(c for c in expected.split("\n")[0] if c.isprintable())
    assert visible[:10] in shown
    person.child.sendeof()
    assert person.status() == exit_status.OK


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, server):
    person = chat()
    person.says("/params ignore_eos true")
    person.type("Hello")
    deadline = time.monotonic() + 10
    while not server.info().stats["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    person.child.sendintr()
    assert "stopped]" in person.prompt()
    deadline = time.monotonic() + 2
    while server.info().stats["running"]:
        assert time.monotonic() < deadline, "the request still runs at the server"
        time.sleep(0.02)
    person.child.sendintr()  # at the prompt it does not leave either
    assert "leaves" in person.prompt()
    assert "system" in person.says("/params")
    person.type("/quit")
    assert person.status() == exit_status.OK


def test_an_error_is_one_sentence_and_the_chat_goes_on(chat):
    person = chat("--max-tokens", "3")
    assert "did you mean 'temperature'?" in person.says("/params temprature 1")
    assert "out of range" in person.says("/params top_p 7")
    assert "did you mean /reset?" in person.says("/rest")
    person.says('/params logit_bias {"100000": 1}')
    shown = person.says("Hello")
    assert "100000" in shown
    assert "Traceback" not in shown
    person.says("/params logit_bias none")
    assert "token" in person.says("Hello")


def test_a_pipe_is_a_chat_too(server, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("/params max_tokens 4\nHello\n/reset\n")
    command = f"{' '.join(TP_RUNTIME)} chat --address {server.address} < {lines}"
    with program(tmp_path / "out", "sh", "-c", command) as running:
        assert running.wait() == exit_status.OK, running.text()
        assert "token" in running.text()
        assert running.lines()[-1] == "A new conversation."
        assert "\x1b" not in running.text()


def test_a_base_model_is_refused_before_anything_starts(tmp_path):
    folder = make_tiny("qwen3", tmp_path / "base", chat_template=False)
    with program(tmp_path / "out", *TP_RUNTIME, "chat", str(folder), *SMALL) as running:
        assert running.wait() == exit_status.REFUSED
        [sentence] = running.text().splitlines()
        assert "tp-runtime generate" in sentence
        assert len(running.seen) == 1
    with pytest.raises(ConfigError, match="generate"):
        refuse_base_model(False, "base")


def test_flags_of_a_server_need_a_model(tmp_path):
    with program(tmp_path / "out", *TP_RUNTIME, "chat", "-tp", "2") as running:
        assert running.wait() == exit_status.REFUSED
        assert "--tensor-parallel-size" in running.text()


def test_a_server_of_its_own_ends_with_the_chat(tmp_path):
    folder = make_tiny("qwen3", tmp_path / "model")
    command = f"echo Hello | {' '.join(TP_RUNTIME)} chat {folder} {' '.join(SMALL)} --max-tokens 3"
    with program(tmp_path / "out", "sh", "-c", command) as running:
        assert running.wait() == exit_status.OK, running.text()
        assert re.search(r"\[\d tokens?", running.text())
        running.assert_all_gone(0.5)


def test_the_conversation_grows_and_a_question_without_answer_is_taken_back():
    talk = Conversation("Be brief.")
    talk.ask("a")
    talk.answered("b")
    talk.ask("c")
    talk.answered("")
    assert [m["content"] for m in talk.messages] == ["Be brief.", "a", "b"]
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.set("system", "none")
    assert talk.messages == []


def test_parameters_are_set_as_they_are_typed():
    talk, said = Conversation(), []
    for line in (
        "/params top_k=5",
        '/params stop ["x", "y"]',
        "/params seed 7",
        "/params stop END",
        '/params logit_bias {"5": 2.5}',
        "/params seed none",
        "/params max-tokens = 9",
    ):
        assert run_command(line, talk, said.append)
    params = talk.params()
    assert (params.top_k, params.stop, params.seed, params.max_tokens) == (5, ["END"], None, 9)
    assert params.logit_bias == {5: 2.5}
    assert said[0].split() == ["top_k", "5", "(set)"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("/params n 2", "one answer"),
        ("/params temperature", "no value"),
        ("/params temperature hot", "temperature"),
        ("/params seeed none", "seed"),
        ("/dance", "/help"),
    ],
)
def test_what_cannot_be_set_changes_nothing(line, word):
    talk = Conversation(parameters={"temperature": 0.5})
    with pytest.raises(InvalidRequestError, match=word):
        run_command(line, talk, print)
    assert talk.parameters == {"temperature": 0.5}


def test_help_names_every_command_and_quit_leaves():
    said: list[str] = []
    assert run_command("/help", Conversation(), said.append)
    for command in ("/help", "/reset", "/params", "/quit", "Ctrl-C"):
        assert command in said[0]
    assert not run_command("/quit", Conversation(), said.append)
