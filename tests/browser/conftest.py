"""A browser: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser_chat import LIMIT_MS, PLAIN_HOST, Chat


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, which all tests share."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    # To browsers, 127.0.0.1 is as good as HTTPS; this name is not.
    arguments = [f"--host-resolver-rules=MAP {PLAIN_HOST} 127.0.0.1"]
    # Its sandbox does not work for root, as who tests in containers often is.
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """What pages complained of: errors, and what their policy has stopped. None may be left at the end."""
    heard: list[str] = []
    yield heard
    assert not heard


@pytest.fixture
def browse(chromium: Any, complaints: list[str]) -> Iterator[Any]:
    """Makes fresh browsers (contexts)."""
    contexts = []

    def make(**options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(LIMIT_MS)
        context.on("weberror", lambda error: complaints.append(str(error.error)))
        context.on("console", lambda said: complaints.append(said.text) if is_complaint(said) else None)
        contexts.append(context)
        return context

    yield make
    for context in contexts:
        context.close()


def is_complaint(said: Any) -> bool:
    """Whether a line in the console tells of a fault; a status that the page shows to its user is none."""
    return (
        said.type == "error" and "Failed to load resource" not in said.text and "WebSocket" not in said.text
    )


@pytest.fixture
def chat(browse: Any, tiny_server: Any) -> Chat:
    """The page of the tiny model's server in a browser of its own."""
    return Chat(browse().new_page(), tiny_server.url).open()
