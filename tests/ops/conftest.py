"""Tests of ops draw their numbers from one seed each: the same numbers alone and in a full run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(20)
