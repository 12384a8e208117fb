"""What the page looks like and how it is reached: themes, widths, keyboard, screen readers."""

from __future__ import annotations

import pytest
from browser_chat import PLAIN_HOST, Chat, events, violations

pytestmark = pytest.mark.browser

ANSWER = """# Rainbows

Light *bends*, **reflects** and [bends again](https://example.org).

- [x] done
- [ ] to do

| colour | angle |
| --- | ---: |
| red | 42.4° |

> Quoted `code`

```python
def angle(n: float) -> float:  # a comment
    return 4 * asin(1 / n) - 2 * acos("0.5")
```
"""


def filled(chat: Chat) -> Chat:
    """The page with all that there can be on it."""
    chat.script(events(ANSWER, tokens=True), events(*ANSWER.split(" "), finish="length"))
    chat.say("How does a rainbow form?")
    chat.page.locator(".speed").wait_for()
    chat.until_answered()
    chat.page.get_by_role("button", name="Show probabilities").click()
    chat.page.locator(".token").first.focus()
    chat.page.get_by_role("button", name="Answer again").click()
    chat.page.get_by_text("2 / 2").wait_for()
    chat.until_answered()
    chat.notice("The answer came to its greatest length.").wait_for()
    return chat


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browse, tiny_server, tmp_path, scheme, width):
    context = browse(color_scheme=scheme, viewport={"width": width, "height": 844}, reduced_motion="reduce")
    chat = Chat(context.new_page(), tiny_server.url).open()
    assert violations(chat.page) == []
    filled(chat)
    assert violations(chat.page) == []
    chat.page.screenshot(path=tmp_path / "conversation.png")
    chat.page.get_by_role("button", name="Version before").click()
    chat.page.get_by_role("button", name="Show probabilities").click()
    chat.page.locator(".token").first.focus()
    assert violations(chat.page) == []
    chat.page.get_by_role("button", name="Settings", exact=True).click()
    chat.page.get_by_label("Temperature").fill("warm")
    chat.page.get_by_text("Temperature must be a number.").wait_for()
    assert violations(chat.page) == []
    chat.page.keyboard.press("Escape")
    if width < 760:
        chat.page.get_by_role("button", name="Show conversations").click()
    chat.page.get_by_role("button", name="How does a rainbow form?", exact=True).wait_for()
    assert violations(chat.page) == []
    chat.page.evaluate("sessionStorage.setItem('streamserve.key', 'x')")
    chat.page.route("**/v1/models", lambda route: route.fulfill(status=401, body="{}"))
    chat.page.reload()
    chat.page.get_by_label("API key").wait_for()
    assert violations(chat.page) == []


def test_nothing_is_wider_than_a_phone(browse, tiny_server):
    context = browse(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    chat = filled(Chat(context.new_page(), tiny_server.url).open())
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert chat.page.evaluate(wide) == 0
    assert chat.page.locator("#thread").evaluate("each => each.scrollWidth - each.clientWidth") == 0
    # What can be done is there without a mouse that points at it.
    for name in ("Edit and send again", "Copy answer", "Answer again", "Send", "Settings"):
        button = chat.page.get_by_role("button", name=name, exact=True).first
        assert button.is_visible(), name
        assert button.evaluate("each => getComputedStyle(each).opacity") != "0" or name == "Send"
    # The list of conversations lies over the page, and goes away when one is chosen.
    chat.page.get_by_role("button", name="Show conversations").click()
    assert chat.page.locator("#pane").evaluate("each => each.inert")
    chat.page.get_by_role("button", name="New chat").click()
    chat.page.get_by_role("heading", name="What is on your mind?").wait_for()
    assert not chat.page.locator("#pane").evaluate("each => each.inert")


def test_the_theme_is_the_systems_until_one_is_chosen(browse, tiny_server):
    context = browse(color_scheme="dark")
    chat = Chat(context.new_page(), tiny_server.url).open()

    def brightness() -> float:
        return chat.page.evaluate(
            "(getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g) ?? []).slice(0, 3)"
            ".reduce((sum, each) => sum + Number(each) / 765, 0)"
        )

    assert brightness() < 0.2
    chat.page.emulate_media(color_scheme="light")
    assert brightness() > 0.8
    button = chat.page.locator("#theme")
    for name, is_dark in (("Light", False), ("Dark", True)):
        button.click()
        assert button.inner_text().endswith(name)
        assert (brightness() < 0.5) == is_dark
    chat.page.reload()
    assert brightness() < 0.2


def test_everything_can_be_done_with_the_keyboard(chat):
    page = chat.page
    chat.script(events("One."), events("Two."))
    # The message box has the focus at the start; Shift+Enter begins a line.
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    page.locator(".markdown", has_text="One.").wait_for()
    chat.until_answered()
    assert chat.questions == ["First line\nsecond"]
    # Up in the empty box edits the last question; Escape leaves that.
    page.keyboard.press("ArrowUp")
    assert page.get_by_label("Edit your message").input_value() == "First line\nsecond"
    page.keyboard.press("Escape")
    assert page.get_by_label("Edit your message").count() == 0
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    # From there backwards: all buttons of the answer, which show that they have the focus.
    names = []
    for _ in range(8):
        page.keyboard.press("Shift+Tab")
        names.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert names[:4] == ["Answer again", "Copy answer", "Edit and send again", "Copy question"]
    page.evaluate("document.querySelector('[aria-label=\"Answer again\"]').focus()")
    page.keyboard.press("Enter")
    page.locator(".markdown", has_text="Two.").wait_for()
    # Dialogs keep the focus, and give it back.
    page.locator("#settings-open").focus()
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        outside = "document.activeElement.closest('.app')"
        assert page.evaluate(outside) is None
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "settings-open"
    page.reload()
    page.locator(".is-assistant").wait_for()
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_screen_readers_are_told_paragraphs_and_not_tokens(chat):
    words = [
        "The",
        "first",
        "paragraph",
        "has",
        "words.\n\nThe",
        "second",
        "as",
        "well.\n\n```sh\nls\n```\n\nEnd.",
    ]
    chat.script(events(*[word + " " for word in words]))
    chat.page.evaluate(
        """() => {
          window.told = [];
          const observer = new MutationObserver((changes) => {
            const added = changes.flatMap((change) => [...change.addedNodes]);
            window.told.push(...added.map((node) => node.textContent));
          });
          observer.observe(document.getElementById("announcer"), { childList: true, subtree: true });
        }"""
    )
    chat.say("Hi")
    chat.page.locator(".markdown", has_text="End.").wait_for()
    chat.until_answered()
    told = chat.page.evaluate("window.told")
    assert 1 <= len(told) <= 5
    assert "The first paragraph has words." in "\n".join(told)
    assert told[-1].endswith("End.")
    assert chat.page.locator("#announcer").get_attribute("aria-live") == "polite"
    # What was said before is not read again when it is opened.
    chat.page.reload()
    chat.page.locator(".markdown", has_text="End.").wait_for()
    assert chat.page.locator("#announcer").inner_text() == ""


def test_code_is_coloured_and_copied(browse, tiny_server):
    context = browse(permissions=["clipboard-read", "clipboard-write"])
    chat = Chat(context.new_page(), tiny_server.url).open()
    chat.script(events(*ANSWER))
    chat.say("Code")
    chat.page.locator(".hljs-keyword").first.wait_for()
    chat.until_answered()
    code = ANSWER.partition("```python\n")[2].partition("\n```")[0]
    assert chat.page.locator(".code code").inner_text() == code
    chat.page.get_by_role("button", name="Copy code").click()
    chat.page.get_by_role("button", name="Copied").wait_for()
    assert chat.page.evaluate("navigator.clipboard.readText()") == code
    chat.page.get_by_role("button", name="Copy answer").click()
    chat.wait(lambda: chat.page.evaluate("navigator.clipboard.readText()") == ANSWER, "it is copied")


def test_a_long_answer_is_drawn_in_parts(chat):
    """The paragraphs that are whole are not touched again: no frame costs as much as the whole answer."""
    chat.page.evaluate(
        """() => {
          window.redrawn = 0;
          new MutationObserver((changes) => {
            for (const { removedNodes } of changes) {
              for (const node of removedNodes) window.redrawn += node.textContent.length;
            }
          }).observe(document.getElementById("thread"), { childList: true, subtree: true });
        }"""
    )
    paragraphs = [f"Paragraph {number} " + "with words " * 10 + "\n\n" for number in range(100)]
    answer = chat.steer("Hi")
    for paragraph in paragraphs:
        answer.write(paragraph)
        chat.page.wait_for_timeout(5)
    answer.end()
    chat.page.locator(".markdown", has_text="Paragraph 99").wait_for()
    chat.until_answered()
    assert chat.page.locator(".markdown p").count() == 100
    total = sum(map(len, paragraphs))
    assert chat.page.evaluate("window.redrawn") < 5 * total


@pytest.mark.parametrize("transport", ["Server-sent events", "WebSocket"])
def test_it_works_without_https(browse, tiny_server, transport):
    url = tiny_server.url.replace("127.0.0.1", PLAIN_HOST)
    chat = Chat(browse().new_page(), url).open()
    assert not chat.page.evaluate("isSecureContext")
    chat.set(transport, Max_tokens="5")
    chat.say("Hi")
    chat.page.locator(".speed", has_text="5 tokens").wait_for()
    chat.until_answered()
    chat.page.get_by_role("button", name="Copy answer").click()
    chat.page.get_by_role("button", name="Copied").wait_for()
    chat.page.reload()
    chat.page.locator(".speed", has_text="5 tokens").wait_for()
