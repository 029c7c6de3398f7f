"""Reads typed fields out of a config.json and remembers which ones it was asked for.

So that what nobody asked for can be judged afterwards: nothing in a config is ignored by accident.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp_runtime.errors import ConfigError

MOST = 2**31 - 1
"""Sizes and ids are 32-bit numbers further on."""
LARGEST = 1e15
"""Far above any base of rotary frequencies or scaling, and far below what a float holds."""
_SHOWN = 60


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises ConfigError naming the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "download the file again."
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists
        raise ConfigError(f"{path} is not a sound JSON file ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object and holds {type(value).__name__}.")
    return value


def short(value: object) -> str:
    """As Python writes it, cut off where it gets long: for errors."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"  # Python does not write very long ones
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class ConfigReader:
    """Fields of one JSON object, with defaults for those that are absent.

    `where` names the object in errors ("config.json", "rope_parameters in config.json")."""

    def __init__(self, fields: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._defaults = defaults
        self._asked: set[str] = set()
        self.where = where

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands; the default when the field is absent (null counts as given)."""
        self._asked.add(name)
        return self._fields.get(name, self._defaults.get(name, default))

    def integer(self, name: str, low: int = 1, high: int = MOST) -> int:
        """A whole number from `low` to `high`."""
        value = self.optional_integer(name, low, high)
        if value is None:
            raise ConfigError(f"{self.where} has no {name}, which the model cannot do without.")
        return value

    def optional_integer(self, name: str, low: int = 1, high: int = MOST) -> int | None:
        """As `integer`; None when the field is absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.wrong(name, value, f"a whole number of at least {low}")
        if value > high:
            raise self.wrong(name, value, f"a whole number of at most {high}")
        return value

    def optional_number(self, name: str, *, zero_is_absent: bool = False) -> float | None:
        """A number greater than zero, at most LARGEST; None when absent or null."""
        value = self.raw(name)
        if value is None or (zero_is_absent and value == 0):
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= LARGEST:
            raise self.wrong(name, value, f"a number greater than zero, at most {LARGEST:g}")
        return float(value)

    def number(self, name: str) -> float:
        """As `optional_number`, but the field has to be there."""
        value = self.optional_number(name)
        if value is None:
            raise ConfigError(f"{self.where} has no {name}, which the model cannot do without.")
        return value

    def flag(self, name: str) -> bool:
        """true or false; absent and null are false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def wrong(self, name: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {short(value)} and should be {wanted}.")

    def remaining(self) -> dict[str, Any]:
        """The fields nobody has asked for."""
        return {key: value for key, value in self._fields.items() if key not in self._asked}
