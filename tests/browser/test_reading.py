"""Those who read and write: scrolling, input methods, screen readers, and where the focus goes."""

from __future__ import annotations

import json

import pytest
from browser_chat import events

pytestmark = pytest.mark.browser

# What screen readers are told, in its order, also of what is taken away again.
LISTEN = """() => {
  window.told = [];
  for (const id of ["announcer", "banner", "unkept"]) {
    new MutationObserver((changes) => {
      for (const { addedNodes } of changes) for (const node of addedNodes) {
        if (!node.parentElement?.closest("[aria-live=off]") && !node.matches?.("[aria-live=off]")) {
          window.told.push(node.textContent);
        }
      }
    }).observe(document.getElementById(id), { childList: true, subtree: true });
  }
}"""


def test_scrolling_up_a_little_is_enough(chat):
    """Text that comes in does not take a reader back who has gone up by a line, as a finger on a pad does."""
    answer = chat.steer("Long")
    for number in range(80):
        answer.write(f"Paragraph {number}.\n\n")
    chat.page.locator(".markdown", has_text="Paragraph 79.").wait_for()
    gap = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)(thread)"
    chat.until(f"{gap} < 1")
    chat.page.mouse.move(700, 400)
    chat.page.mouse.wheel(0, -30)
    chat.until(f"{gap} > 20")
    top = chat.page.evaluate("document.getElementById('thread').scrollTop")
    for number in range(80, 90):
        answer.write(f"Paragraph {number}.\n\n")
    chat.page.locator(".markdown", has_text="Paragraph 89.").wait_for()
    assert chat.page.evaluate("document.getElementById('thread').scrollTop") == top
    # At the end again, one is taken along.
    chat.page.mouse.wheel(0, 5000)
    chat.page.get_by_role("button", name="To the end").wait_for(state="hidden")
    answer.write("Paragraph 90.\n\n" * 9)
    chat.until(f"{gap} < 1 && document.querySelector('.markdown').innerText.includes('Paragraph 90.')")
    answer.end()
    chat.until_answered()


def test_keys_of_an_input_method_are_its_own(chat):
    asked = chat.script(events("One."))
    chat.page.get_by_label("Message", exact=True).fill("nihon")
    # Chromium says that it is composing; Safari has only the code of such keys.
    for state in ("{ isComposing: true }", "{ keyCode: 229 }"):
        press = (
            f"new KeyboardEvent('keydown', {{ key: 'Enter', bubbles: true, cancelable: true, ...{state} }})"
        )
        assert chat.page.evaluate(f"document.getElementById('prompt').dispatchEvent({press})")
    assert asked == []
    chat.page.keyboard.press("Enter")
    chat.until_answered()
    assert len(asked) == 1
    # Escape gives up what is being composed, and not the answer.
    answer = chat.steer("Go on")
    answer.write("Text")
    press = "new KeyboardEvent('keydown', { key: 'Escape', bubbles: true, isComposing: true })"
    chat.page.evaluate(f"document.getElementById('prompt').dispatchEvent({press})")
    answer.write(" and more")
    chat.page.locator(".markdown", has_text="Text and more").wait_for()
    assert chat.page.locator("[aria-busy=true]").count() == 1
    chat.page.keyboard.press("Escape")
    chat.notice("Stopped.").wait_for()


def test_what_was_said_is_not_said_again(chat):
    # The definition at its end is one for the paragraphs before it, all of which are drawn anew.
    chat.page.evaluate(LISTEN)
    chat.script(events("First [a].\n\n", "Second.\n\n", "Third.\n\n", "[a]: https://example.org\n"))
    chat.say("Hi")
    chat.until_answered()
    chat.page.locator(".markdown a").wait_for()
    told = "\n".join(chat.page.evaluate("window.told"))
    assert [told.count(word) for word in ("First", "Second", "Third")] == [1, 1, 1]


def test_screen_readers_are_told_once_why_nothing_comes(chat):
    busy = b'{"error": {"message": "Too many.", "code": "overloaded"}}'
    chat.page.evaluate(LISTEN)
    chat.script(busy, status=429, headers={"Retry-After": "3"})
    chat.set(Max_tokens="5")
    chat.say("Hi")
    chat.page.locator(".speed", has_text="5 tokens").wait_for()
    chat.notice("The answer came to its greatest length.").wait_for()
    told = chat.page.evaluate("window.told")
    assert [text for text in told if "busy" in text] == ["The server is busy. Trying again in 3 s."]
    assert told.count("The answer came to its greatest length.") == 1
    # How far a start is moves; that it starts is said once.
    told_progress = []

    def starting(route):
        told_progress.append(0.1 * len(told_progress))
        progress = {"stage": "loading weights", "fraction": told_progress[-1]}
        body = json.dumps({"status": "loading", "progress": progress})
        route.fulfill(status=503, body=body, content_type="application/json")

    chat.page.add_init_script(f"addEventListener('DOMContentLoaded', {LISTEN})")
    chat.page.route("**/ready", starting)
    chat.page.route("**/v1/models", lambda route: route.fulfill(status=503, body="{}"))
    chat.page.reload()
    chat.page.get_by_text("loading weights 30 %").wait_for()
    told = chat.page.evaluate("window.told")
    assert len([text for text in told if "starting" in text]) == 1
    # What an old answer came to is not news.
    assert not [text for text in told if "greatest length" in text]


def test_the_focus_is_not_lost_with_what_is_deleted(chat):
    chat.script(*[events("Yes.")] * 3)
    for name in ("One", "Two", "Three"):
        chat.page.get_by_role("button", name="New chat").click()
        chat.say(name)
        chat.until_answered()
    focused = "document.activeElement.getAttribute('aria-label')"
    chat.page.get_by_role("button", name="Delete Two").focus()
    chat.page.keyboard.press("Enter")
    chat.until(f"{focused} === 'Delete One'")
    chat.page.keyboard.press("Enter")
    chat.until(f"{focused} === 'Delete Three'")
    chat.page.keyboard.press("Enter")
    chat.until("document.activeElement.id === 'new-chat'")


def test_of_many_conversations_only_what_changes_is_drawn(chat):
    chat.script(*[events("Yes.")] * 3)
    for name in ("One", "Two"):
        chat.page.get_by_role("button", name="New chat").click()
        chat.say(name)
        chat.until_answered()
    items = chat.page.locator(".conversations li")
    items.evaluate_all("all => { for (const each of all) each.isFirst = true; }")
    chat.say("Again")
    chat.until_answered()
    assert items.evaluate_all("all => all.map((each) => each.isFirst === true)") == [False, True]
    chat.page.get_by_role("button", name="One", exact=True).click()
    chat.page.locator(".bubble", has_text="One").wait_for()
    assert items.evaluate_all("all => all.map((each) => each.classList.contains('is-current'))") == [
        False,
        True,
    ]
    # A name that is not changed after all stands there again.
    for key in ("Escape", "Enter"):
        chat.page.get_by_role("button", name="Rename One").click()
        chat.page.get_by_label("New name").press(key)
        chat.until("document.querySelectorAll('.conversation').length === 2")
    assert chat.titles == ["Two", "One"]
