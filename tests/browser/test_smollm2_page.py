"""The chat page with the default model behind the real server."""

from __future__ import annotations

import re

import httpx
import pytest
from browser_chat import Chat
from server import running_server

pytestmark = [pytest.mark.browser, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def server():
    with running_server("--dtype=float32") as server:
        yield server


@pytest.fixture
def chat(browse, server) -> Chat:
    return Chat(browse().new_page(), server.url).open()


def running(server) -> int:
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    return int(float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[1]))


@pytest.mark.parametrize("transport", ["Server-sent events", "WebSocket"])
def test_the_text_grows_while_one_watches(chat, transport):
    chat.page.evaluate(
        """() => {
          window.lengths = [];
          const all = { childList: true, subtree: true, characterData: true };
          new MutationObserver(() => {
            const text = document.querySelector(".is-streaming .markdown")?.innerText ?? "";
            if (text.length > (window.lengths.at(-1) ?? 0)) window.lengths.push(text.length);
          }).observe(document.getElementById("thread"), all);
        }"""
    )
    chat.set(transport, Max_tokens="60", Temperature="0")
    chat.say("Write a short story about a river.")
    chat.until_answered()
    lengths = chat.page.evaluate("window.lengths")
    assert len(lengths) > 5
    assert len(chat.answers[0]) > lengths[0] * 3
    speed = chat.page.locator(".speed").inner_text()
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ m?s", speed)


def test_it_knows_its_capital_and_is_stopped(chat, server):
    chat.set(Temperature="0", Max_tokens="30")
    chat.say("What is the capital of Japan?")
    chat.page.locator(".markdown", has_text="Tokyo").wait_for()
    chat.until_answered()
    chat.set(Max_tokens="")
    chat.page.get_by_role("button", name="New chat").click()
    chat.say("Write a short story about a river.")
    chat.until_written(100)
    assert running(server) == 1
    chat.page.get_by_role("button", name="Stop").click()
    chat.until_answered()
    chat.wait(lambda: running(server) == 0, "the request is gone")
    chat.notice("Stopped.").wait_for()
    texts = chat.answers
    chat.page.reload()
    chat.notice("Stopped.").wait_for()
    assert chat.answers == texts
