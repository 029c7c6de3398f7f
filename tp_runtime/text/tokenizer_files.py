"""The files of a tokenizer folder, read as transformers 5 reads them.

tokenizer.json is the tokenizer; tokenizer_config.json (and special_tokens_map.json of older
folders) adds tokens and names the special ones; which of them a prompt gets is the post-processor's
matter alone (`add_bos_token` in the config does not count beside a tokenizer.json); the chat
template is in chat_template.jinja or in the config. A folder without tokenizer.json is converted
once, by a child process, because only transformers can and this process never loads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers

from tp_runtime.errors import ConfigError
from tp_runtime.text.llama_pipeline import needs_llama_pipeline, set_llama_pipeline

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SOURCES = (
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)
_CONVERT_TIMEOUT_S = 300.0
_CONVERT = """
import sys
sys.modules["torch"] = None  # a tokenizer needs none, and importing it takes seconds
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file; ConfigError when it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object; fetch the file again.")
    return value


def has_tokenizer(folder: Path) -> bool:
    """Whether there is any tokenizer in the folder, in whatever format."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_SOURCES))


def tokenizer_folder(folder: Path) -> Path:
    """`folder` itself, or the cached conversion of a tokenizer in an older format.

    Raises ConfigError when there is no tokenizer or the conversion fails."""
    if (folder / "tokenizer.json").is_file():
        return folder
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} has no tokenizer (tokenizer.json is missing); copy the tokenizer files of "
            "the model into it."
        )
    target = _cache_root() / _digest(folder)
    if not (target / "tokenizer.json").is_file():
        _convert(folder, target)
    return target


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tp_runtime" / "tokenizers"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in _SOURCES or path.suffix in (".json", ".jinja"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _convert(folder: Path, target: Path) -> None:
    """Writes the conversion beside `target` and moves it into place whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / "tokenizer"
        command = [sys.executable, "-c", _CONVERT, str(folder), str(made)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        try:
            run = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_CONVERT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"Converting the tokenizer of {folder} took more than {_CONVERT_TIMEOUT_S:g} s."
            ) from error
        if run.returncode != 0 or not (made / "tokenizer.json").is_file():
            cause = run.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ConfigError(
                f"{folder} has no tokenizer.json, and transformers could not make one from the "
                f"files there: {cause[0]}"
            )
        try:
            os.replace(made, target)
        except OSError:  # another process was faster, or left half a folder behind
            if not (target / "tokenizer.json").is_file():
                shutil.rmtree(target, ignore_errors=True)
                os.replace(made, target)


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json beside it counts only in folders of the
    older form, whose config lists no `added_tokens_decoder`."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
    return settings


def load_tokenizer(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """tokenizer.json with what the settings add to it; raises ConfigError."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        what = str(error)[:200]
        raise ConfigError(f"{path} is not a tokenizer ({what}); fetch the file again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model_type = read_json(folder / "config.json").get("model_type", "")
    if needs_llama_pipeline(tokenizer, settings, model_type):
        set_llama_pipeline(tokenizer, settings)
    _add_tokens(tokenizer, settings)
    return tokenizer


def special_token_names(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token` -> "<s>" and so on, for those that are set."""
    named = {name: _content(settings.get(name)) for name in NAMED_TOKENS}
    return {name: content for name, content in named.items() if content is not None}


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Tokens that the settings know and tokenizer.json does not, in the order of their ids."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            tokenizer.add_tokens([_added_token(token, token.get("special", False))])
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    special = [settings.get(name) for name in NAMED_TOKENS] + extra
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in special:
        content = _content(token)
        if content is not None and content not in known:
            tokenizer.add_special_tokens([_added_token(token, True)])


def _added_token(token: Any, special: bool) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=special, normalized=not special)
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    given = {name: token[name] for name in flags if name in token}
    return tokenizers.AddedToken(token["content"], special=special, **given)


def read_chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Template sources by name; files count before the config, {} for a base model."""
    templates: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        templates["default"] = main.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if templates:
        return templates
    given = settings.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {}
