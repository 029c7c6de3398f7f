"""The status page in a real browser: it fills itself in, and fits narrow screens."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.http.api_server import api_server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), "")

needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome in the PATH")


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    with api_server(tmp_path) as api:
        answer = api.http.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert re.findall(r"""(?:src|href)=["'](?!data:)""", answer.text) == []
        assert "://" not in answer.text
        status = api.http.get("/status").json()
        assert (status["state"], status["model"]) == ("ready", "fake")
        assert status["facts"]["max_model_len"] == 4096


def dom(url: str, folder: Path) -> str:
    """The page after it has polled for a while."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,900"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=6000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@needs_browser
def test_a_browser_fills_the_page_in(tmp_path):
    with api_server(tmp_path) as api:
        page = dom(api.url, tmp_path / "browser")
    assert '<h1 id="model">fake</h1>' in page
    assert 'class="ready">ready</span>' in page
    assert "1 × cpu, float32, 4,096 tokens of context" in page
    assert "No worker is there." in page  # the fake engine has none


@needs_browser
def test_a_browser_shows_that_the_server_recovers(tmp_path):
    with api_server(tmp_path) as api:
        api.engine.state = "recovering"
        page = dom(api.url, tmp_path / "browser")
    assert 'class="recovering">recovering</span>' in page
