"""`LLM`: a model in one line, for programs that are not servers.

It starts a server of its own as a child process (tp_runtime.local_server) and talks to it as any
client does. What it adds to `Client` is the server's life, lists in the order they were given, and
a progress bar.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError, ServerUnavailableError, WorkerFailedError
from tp_runtime.local_server import LocalServer

if TYPE_CHECKING:
    from tp_runtime.client import Client
    from tp_runtime.client_arguments import Messages, ParamsArgument, Prompts
    from tp_runtime.client_requests import Batch
    from tp_runtime.outputs import RequestOutput


class LLM:
    """A model on `tensor_parallel_size` ranks, ready when the constructor returns.

        with LLM("path/to/model", tensor_parallel_size=2) as llm:
            outputs = llm.generate(["Hello", "Bye"], SamplingParams(max_tokens=16))

    `model` is a folder or a hub name; `options` are the other fields of EngineConfig, named like
    the flags of `tp-runtime serve` (`max_model_len`, `gpu_memory_utilization`, `enforce_eager`).
    Works from any thread and needs no `__main__` guard. The server ends with `close`, with the
    `with` block, with the object, or with the program, however that ends.

    Raises ConfigError for what cannot work (nothing is left running), WorkerFailedError when the
    server could not start."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        tensor_parallel_size: int = 1,
        device: str = "auto",
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        _refuse_under_torchrun()
        options |= {"device": device, "dtype": dtype}
        config = config_from_options(model, tensor_parallel_size, options)
        from tp_runtime.client import Client

        self._creator = os.getpid()
        self._server = LocalServer(config)
        info = self._server.wait_ready()
        try:
            self.client: Client = Client(info.address)
        except BaseException:
            self._server.close()
            raise

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: ParamsArgument = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | None = None,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        detokenize: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order; a single prompt gives a list of one.

        A prompt is a string or a list of token ids. `sampling_params`: one for all or one for each;
        its fields may be given as keyword arguments instead. `use_tqdm`: a progress bar on stderr;
        None: for several prompts on a terminal. `timeout`: seconds, for each request. Raises
        InvalidRequestError for what cannot work, what ended a request (the others are cancelled),
        and, when the server failed, the cause of that."""
        requests = self.client.requests
        options = {
            "timeout_s": timeout,
            "add_special_tokens": add_special_tokens,
            "detokenize": detokenize,
        }
        return self._run(
            requests.generate(prompts, prompt_token_ids, sampling_params, fields, options, False),
            use_tqdm,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsArgument = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answers a chat (a list of `{"role": ..., "content": ...}`), or several, through the
        model's chat template; a model without one is an InvalidRequestError. Otherwise as
        `generate`."""
        options = {
            "timeout_s": timeout,
            "tools": None if tools is None else list(tools),
            "chat_template_kwargs": chat_template_kwargs,
        }
        batch = self.client.requests.chat(messages, sampling_params, fields, options, False)
        return self._run(batch, use_tqdm)

    def _run(self, batch: Batch, use_tqdm: bool | None) -> list[RequestOutput]:
        from tp_runtime.batch_run import run_batch

        try:
            return run_batch(self.client.requests, batch, use_tqdm)
        except (ServerUnavailableError, WorkerFailedError):
            self.raise_if_over()  # the first cause, where one was recorded
            raise

    def raise_if_over(self) -> None:
        """Raises the cause when the server has failed or is gone; for users of `client`."""
        self._server.raise_if_over()

    def close(self) -> None:
        """End the server and everything that belongs to it. May be called any number of times,
        also after the server has failed; a forked copy of the program leaves them alone."""
        if os.getpid() != getattr(self, "_creator", None):
            return
        client = getattr(self, "client", None)
        if client is not None:
            client.close()
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()


def config_from_options(
    model: str | os.PathLike[str], tensor_parallel_size: int, options: Mapping[str, Any]
) -> EngineConfig:
    """An EngineConfig from keyword arguments, checked.

    Raises ConfigError naming what is unknown, of the wrong type or out of range."""
    known = {field.name for field in msgspec.structs.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"There is no setting {', '.join(unknown)}; the settings are "
            f"{', '.join(sorted(known - {'model'}))}."
        )
    values = {
        **options,
        "model": os.fspath(model),
        "tensor_parallel_size": tensor_parallel_size,
    }
    try:
        config = msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"A setting cannot be used: {error}.") from error
    config.validate()
    return config


def _refuse_under_torchrun() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        raise ConfigError(
            "LLM(...) starts ranks of its own and cannot be used under torchrun, which has started "
            "them already; use `with tp_runtime.launch.session(model) as client:` in this script, "
            "or start it with plain python."
        )
