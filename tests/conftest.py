"""Fixtures of all tests: `gloo_pool(size)` gives a pool of real gloo processes (tests.gloo_pool)."""

from __future__ import annotations

pytest_plugins = ["tests.gloo_pool"]
