"""From what a user calls a model to a folder on this machine.

A folder is taken as it is; a hub name ("Qwen/Qwen3-0.6B") is looked up in the local cache and
downloaded where it is not there. Only files that the runtime reads are fetched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tp_runtime.checkpoint_files import find_checkpoint
from tp_runtime.errors import ConfigError, WeightsError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
_NOT = ["*/*", "consolidated*"]


def resolve_model_folder(model: str, revision: str | None = None) -> Path:
    """The folder of `model`: an existing folder, or a hub name `owner/name`.

    Blocks while a download runs (its progress goes to stderr). Raises ConfigError, one sentence:
    no such folder, not a hub name, not on the hub, not allowed, no connection."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ConfigError(
            f"{model} is a file; give the folder that holds config.json and *.safetensors."
        )
    looks_local = model.startswith((".", "/", "~")) or os.sep * 2 in model
    if looks_local or not _HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"There is no folder {model!r}; give the folder of a model, or a name on the Hugging "
            'Face hub such as "Qwen/Qwen3-0.6B".'
        )
    return _from_hub(model, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub as hub  # 100 ms, and only needed here
    from huggingface_hub import errors

    def snapshot(local: bool) -> Path:
        return Path(
            hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns=_NOT,
                local_files_only=local,
            )
        )

    try:
        cached = snapshot(local=True)
        if (cached / "config.json").is_file() and find_checkpoint(cached).files:
            return cached
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, WeightsError):
        pass  # not there, or only a part of it
    try:
        return snapshot(local=False)
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"The model {name!r} is gated; accept its terms on huggingface.co and set HF_TOKEN."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(
            f"There is no folder {name!r} here and no model of that name on the Hugging Face hub "
            "(a private one needs HF_TOKEN)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"The model {name!r} has no revision {revision!r}.") from error
    except Exception as error:  # connection errors come from several libraries
        raise ConfigError(
            f"There is no folder {name!r} here, and the Hugging Face hub cannot be reached to look "
            f"for a model of that name ({type(error).__name__}); download it elsewhere and give "
            "its folder."
        ) from error
