"""Answers that are hard to draw: long ones, deep ones, and those in other scripts."""

from __future__ import annotations

import pytest
from browser_chat import events

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    "unit", ["> ", "- ", "1. ", "> - ", "*a ", "~a~~b ", "[", "![a](", "`a``", "<a ", "| a "]
)
def test_a_model_that_repeats_itself_does_not_break_the_page(chat, unit):
    text = unit * (12_000 // len(unit)) + "x"
    chat.script(events(text[:5000], text[5000:]), events("Fine."))
    chat.say("Hi")
    chat.until_answered()
    assert chat.stored_answers == [text]
    assert chat.answers[0].strip()
    # It can be talked on, and opened again.
    chat.say("And now?")
    chat.page.locator(".markdown", has_text="Fine.").wait_for()
    chat.until_answered()
    chat.page.reload()
    chat.page.locator(".markdown", has_text="Fine.").wait_for()
    assert len(chat.answers) == 2


def test_all_of_a_long_block_is_drawn_though_nothing_follows(chat):
    """A block that takes long is drawn more rarely than text comes; what comes last is not forgotten."""
    answer = chat.steer("List")
    for start in range(0, 1500, 50):
        answer.write("".join(f"- item {number} and **words**\n" for number in range(start, start + 50)))
    answer.write("- the last one")
    chat.page.locator("li", has_text="the last one").wait_for()
    assert chat.page.locator(".markdown li").count() == 1501
    assert chat.page.locator("[aria-busy=true]").count() == 1
    answer.end()
    chat.until_answered()


@pytest.mark.parametrize("info", ["python", "python title=a.py", "{.python .numberLines}", "Python", ""])
def test_code_that_is_being_written_is_only_lengthened(chat, info):
    answer = chat.steer("Code")
    answer.write(f"```{info}\na = 1\n")
    code = chat.page.locator(".code code")
    code.wait_for()
    code.evaluate("each => { each.isFirst = true; }")
    for number in range(5):
        answer.write(f"b = {number}\n")
        chat.page.locator(".code code", has_text=f"b = {number}").wait_for()
        assert code.evaluate("each => each.isFirst === true")
    answer.write("```\n")
    answer.end()
    chat.until_answered()
    if info:
        assert chat.page.locator(".code-head").inner_text() == "Python"
        assert chat.page.locator(".hljs-number").count() == 6


HEBREW = "\u05e9\u05dc\u05d5\u05dd"


def test_each_text_runs_in_its_own_direction(chat):
    code = f"```python\n# {HEBREW}\n```"
    chat.script(events(f"{HEBREW} 1\n\n- {HEBREW} 2\n\nEnglish\n\n{code}\n"))
    direction = "each => getComputedStyle(each).direction"
    assert chat.page.locator("#prompt").evaluate("each => getComputedStyle(each).unicodeBidi") == "plaintext"
    chat.say(HEBREW)
    chat.until_answered()
    for selector in (".bubble", ".markdown > p >> nth=0", ".markdown li", "#title", ".conversation"):
        assert chat.page.locator(selector).evaluate(direction) == "rtl", selector
    for selector in (".markdown > p >> nth=1", ".markdown pre", "#thread"):
        assert chat.page.locator(selector).evaluate(direction) == "ltr", selector
    # The signs of a list are on the side where its text begins, and within the page.
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert chat.page.evaluate(wide) == 0
    assert chat.page.locator(".markdown ul").evaluate("each => getComputedStyle(each).paddingRight") != "0px"
