"""Conversations that are looked for and taken away, and questions that are too long to be shown whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_chat import Chat, events, violations

pytestmark = pytest.mark.browser

NARROW = {"width": 390, "height": 844}


def say_all(chat: Chat, **said: str) -> None:
    """Begins a conversation for each question, with that answer."""
    chat.script(*[events(answer) for answer in said.values()])
    for question in said:
        if chat.page.locator("#sidebar").is_hidden():
            chat.page.get_by_role("button", name="Show conversations").click()
        chat.page.get_by_role("button", name="New chat").click()
        chat.say(question)
        chat.until_answered()


def look_for(chat: Chat, text: str, num_found: int) -> None:
    chat.page.get_by_label("Search conversations").fill(text)
    said = "1 conversation found" if num_found == 1 else f"{num_found} conversations found"
    chat.until(f"document.getElementById('found').textContent === '{said}'")


def test_conversations_are_found_by_title_and_by_text(chat):
    say_all(chat, Rivers="The Nile is long.", Mountains="Everest is high.", Lakes="Ladoga is deep.")
    assert chat.titles == ["Lakes", "Mountains", "Rivers"]
    look_for(chat, "NILE", 1)
    assert chat.titles == ["Rivers"]
    look_for(chat, "is", 3)
    look_for(chat, "lake", 1)
    assert chat.titles == ["Lakes"]
    look_for(chat, "sea", 0)
    chat.page.get_by_text("No conversation has that in it.").wait_for()
    assert violations(chat.page) == []
    look_for(chat, "everest", 1)
    chat.page.get_by_role("button", name="Mountains", exact=True).click()
    chat.page.locator(".markdown", has_text="Everest is high.").wait_for()
    # Escape brings all of them back, and ends no answer.
    chat.page.get_by_label("Search conversations").press("Escape")
    chat.until("document.querySelectorAll('.conversation').length === 3")
    assert chat.page.get_by_label("Search conversations").input_value() == ""
    assert chat.page.locator("#found").inner_text() == ""


def test_what_is_said_while_one_looks_is_found(chat):
    say_all(chat, Rivers="The Nile is long.", Lakes="Ladoga is deep.")
    look_for(chat, "volga", 0)
    chat.script(events("The Volga is wide."))
    chat.say("Another one?")
    chat.until_answered()
    chat.until("document.querySelectorAll('.conversation').length === 1")
    assert chat.titles == ["Lakes"]


def test_looking_on_a_phone(browse, tiny_server):
    chat = Chat(browse(viewport=NARROW).new_page(), tiny_server.url).open()
    say_all(chat, Rivers="The Nile is long.", Lakes="Ladoga is deep.")
    chat.page.get_by_role("button", name="Show conversations").click()
    look_for(chat, "nile", 1)
    assert violations(chat.page) == []
    chat.page.get_by_label("Search conversations").press("Escape")
    chat.until("document.querySelectorAll('.conversation').length === 2")
    # The first one was for the field.
    assert chat.page.locator("#sidebar").is_visible()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    chat.page.get_by_label("Search conversations").press("Escape")
    chat.page.locator("#sidebar").wait_for(state="hidden")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_conversation_can_be_taken_away(browse, tiny_server, width):
    chat = Chat(browse(viewport={"width": width, "height": 844}).new_page(), tiny_server.url).open()
    button = chat.page.get_by_role("button", name="Download this conversation")
    assert button.is_disabled()
    chat.script(events("*Hi.*"))
    chat.say("Hello: you?")
    chat.until_answered()
    with chat.page.expect_download() as found:
        button.focus()
        chat.page.keyboard.press("Enter")
    assert found.value.suggested_filename == "Hello you.md"
    text = Path(found.value.path()).read_text(encoding="utf-8")
    model = chat.page.locator("#model").input_value()
    assert text == f"# Hello: you?\n\n## You\n\nHello: you?\n\n## {model}\n\n*Hi.*\n"
    assert violations(chat.page) == []
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= width


def test_of_a_long_question_the_beginning_is_shown(chat):
    text = "".join(f"Line {number} has been pasted.\n" for number in range(500)).strip()
    asked = chat.script(events("Read."))
    chat.say(text)
    chat.until_answered()
    assert asked[0]["messages"][-1]["content"] == text
    bubble = chat.page.locator(".bubble")
    assert len(bubble.inner_text()) < 5000
    more = chat.page.get_by_role("button", name=f"Show all {len(text):,} characters")
    assert more.get_attribute("aria-expanded") == "false"
    assert violations(chat.page) == []
    more.focus()
    chat.page.keyboard.press("Enter")
    less = chat.page.get_by_role("button", name="Show less")
    less.wait_for()
    assert bubble.inner_text().startswith(text)
    assert less.evaluate("each => each === document.activeElement")
    chat.page.keyboard.press("Enter")
    more.wait_for()
    # All of it is edited.
    chat.page.locator(".message.is-user").hover()
    chat.page.get_by_role("button", name="Edit and send again").click()
    assert chat.page.get_by_label("Edit your message").input_value() == text
