"""The chat page against a real server with the tiny model."""

from __future__ import annotations

import re

import httpx
import pytest
from browser_chat import Chat, events
from server import load, running_server, wait_idle

pytestmark = pytest.mark.browser

TRANSPORTS = pytest.mark.parametrize("transport", ["Server-sent events", "WebSocket"])


def running(server) -> int:
    """The gauge of requests in the batch."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    return int(float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[1]))


def conversation(chat: Chat) -> str:
    """The address of the open conversation."""
    return "/" + chat.page.evaluate("location.hash")


@TRANSPORTS
def test_a_question_is_answered(chat, tiny_server, transport):
    chat.set(transport, Max_tokens="20", Temperature="0")
    chat.say("Tell me about rivers.")
    chat.until_answered()
    body = {
        "messages": [{"role": "user", "content": "Tell me about rivers."}],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    expected = httpx.post(f"{tiny_server.url}/v1/chat/completions", json=body, timeout=300).json()
    assert chat.stored_answers == [expected["choices"][0]["message"]["content"]]
    assert chat.questions == ["Tell me about rivers."]
    assert chat.titles == ["Tell me about rivers."]
    # Tokens that came all at once have no speed.
    speed = chat.page.locator(".speed").inner_text()
    assert re.fullmatch(r"20 tokens( · [\d.]+ tokens/s)? · first after [\d.]+ m?s", speed)


@TRANSPORTS
def test_stop_ends_the_answer_on_the_server_too(chat, tiny_server, transport):
    chat.endless()
    chat.set(transport)
    chat.say("Go on.")
    stop = chat.page.get_by_role("button", name="Stop")
    chat.until_written(200)
    assert running(tiny_server) == 1
    stop.click()
    chat.until_answered()
    chat.wait(lambda: running(tiny_server) == 0, "the request is gone")
    assert chat.notice("Stopped.").is_visible()
    text = chat.answers[0]
    assert len(text) > 200
    # It goes on where it stopped, in the same message; Escape stops as well.
    chat.page.get_by_role("button", name="Continue").click()
    chat.until_written(len(text) + 100)
    chat.page.keyboard.press("Escape")
    chat.until_answered()
    chat.wait(lambda: running(tiny_server) == 0, "the request is gone")
    assert len(chat.answers) == 1


def test_a_page_that_is_closed_can_be_opened_again(chat, tiny_server):
    chat.endless()
    chat.say("Go on.")
    chat.until_written(100)
    address = conversation(chat)
    other = chat.page.context.new_page()
    chat.page.close()
    again = Chat(other, tiny_server.url).open(address)
    again.until_written(500)
    assert running(tiny_server) == 1
    again.page.get_by_role("button", name="Stop").click()
    again.until_answered()
    again.wait(lambda: running(tiny_server) == 0, "the request is gone")


def test_a_reload_keeps_the_conversation_and_what_had_come(chat):
    chat.set(Max_tokens="15")
    chat.say("First")
    chat.until_answered()
    chat.say("Second")
    chat.until_answered()
    before = chat.questions, chat.answers, chat.titles
    chat.page.reload()
    chat.page.wait_for_selector(".is-assistant >> nth=1")
    assert (chat.questions, chat.answers, chat.titles) == before


def test_regenerate_and_edit_make_versions(chat):
    asked = chat.script(events("One."), events("Two."), events("Three."), events("Four."))
    chat.say("Question")
    chat.until_answered()
    chat.page.get_by_role("button", name="Answer again").click()
    chat.page.get_by_text("2 / 2").wait_for()
    chat.page.locator(".markdown", has_text="Two.").wait_for()
    chat.until_answered()
    assert chat.answers == ["Two."]
    assert asked[1]["messages"] == [{"role": "user", "content": "Question"}]
    chat.page.get_by_role("button", name="Version before").click()
    chat.page.get_by_text("1 / 2").wait_for()
    assert chat.answers == ["One."]
    chat.say("And then?")
    chat.until_answered()
    assert asked[2]["messages"][1:] == [
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "And then?"},
    ]
    # The first question is put in another way: all of the rest is a version of its own.
    chat.page.locator(".is-user").first.hover()
    chat.page.get_by_role("button", name="Edit and send again").first.click()
    chat.page.get_by_label("Edit your message").fill("Another question")
    chat.page.keyboard.press("Enter")
    chat.page.locator(".markdown", has_text="Four.").wait_for()
    chat.until_answered()
    assert (chat.questions, chat.answers) == (["Another question"], ["Four."])
    assert asked[3]["messages"] == [{"role": "user", "content": "Another question"}]
    chat.page.get_by_role("button", name="Version before").first.click()
    chat.page.locator(".markdown", has_text="Three.").wait_for()
    assert (chat.questions, chat.answers) == (["Question", "And then?"], ["One.", "Three."])
    chat.page.reload()
    chat.page.locator(".markdown", has_text="Three.").wait_for()
    assert chat.answers == ["One.", "Three."]


def test_conversations_are_named_deleted_and_brought_back(chat):
    chat.script(*[events("Yes.")] * 3)
    for name in ("One", "Two", "Three"):
        chat.page.get_by_role("button", name="New chat").click()
        chat.say(name)
        chat.until_answered()
    assert chat.titles == ["Three", "Two", "One"]
    chat.page.get_by_role("button", name="Two", exact=True).click()
    chat.page.locator(".bubble", has_text="Two").wait_for()
    chat.page.get_by_role("button", name="Rename Two").click()
    chat.page.get_by_label("New name").fill("Second")
    chat.page.keyboard.press("Enter")
    chat.page.get_by_role("heading", name="Second").wait_for()
    assert chat.titles == ["Three", "Second", "One"]
    chat.page.locator("li", has_text="Second").hover()
    chat.page.get_by_role("button", name="Delete Second").click()
    chat.page.get_by_role("heading", name="What is on your mind?").wait_for()
    assert chat.titles == ["Three", "One"]
    chat.page.get_by_role("button", name="Undo").click()
    chat.page.locator(".bubble", has_text="Two").wait_for()
    assert chat.titles == ["Three", "Second", "One"]
    chat.page.go_back()
    chat.page.reload()
    chat.page.wait_for_selector(".conversation")
    assert chat.titles == ["Three", "Second", "One"]


def test_settings_reach_the_model_and_wrong_ones_do_not(chat):
    asked = chat.script(events("Yes."), events("Yes."))
    chat.page.get_by_role("button", name="Settings", exact=True).click()
    chat.page.get_by_label("System prompt").fill("Be brief.")
    chat.page.get_by_label("Temperature").fill("0.5")
    chat.page.get_by_label("Top p").fill("7")
    chat.page.get_by_text("Top p must be at most 1.").wait_for()
    chat.page.keyboard.press("Escape")
    chat.say("Hi")
    chat.until_answered()
    assert asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert asked[0]["temperature"] == 0.5
    assert "top_p" not in asked[0]
    # They belong to the conversation, and the next one begins with them.
    chat.page.reload()
    chat.page.get_by_role("button", name="New chat").click()
    chat.say("Hello")
    chat.until_answered()
    assert [asked[1]["messages"][0]["content"], asked[1]["temperature"]] == ["Be brief.", 0.5]


def test_the_server_refuses_and_the_page_says_why(chat):
    chat.set(Max_tokens="5")
    chat.say("word " * 50_000)
    chat.page.locator(".notice", has_text="context").wait_for()
    chat.page.get_by_role("button", name="Try again").wait_for()
    chat.page.locator(".is-user").hover()
    chat.page.get_by_role("button", name="Edit and send again").click()
    chat.page.get_by_label("Edit your message").fill("word")
    chat.page.locator(".edit").get_by_role("button", name="Send").click()
    chat.page.locator(".speed", has_text="5 tokens").wait_for()


def test_probabilities_of_tokens(chat):
    chat.set(chances=True, Max_tokens="12", Temperature="0")
    chat.say("Tell me about rivers.")
    chat.until_answered()
    chat.page.get_by_role("button", name="Show probabilities").click()
    tokens = chat.page.locator(".token")
    assert tokens.count() == 12
    tokens.nth(2).hover()
    rows = chat.page.locator(".alternatives li")
    assert rows.count() >= 5
    assert chat.page.locator(".alternatives .is-chosen").count() == 1
    tokens.first.focus()
    chat.page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("each => each === document.activeElement")
    assert "%" in tokens.nth(1).get_attribute("aria-label")


def test_the_reader_is_left_where_they_are(chat):
    chat.script(events(*(f"Paragraph {number}.\n\n" for number in range(60))))
    chat.say("Long")
    chat.until_answered()
    to_end = chat.page.get_by_role("button", name="To the end")
    thread = chat.page.locator("#thread")
    assert thread.evaluate("each => each.scrollHeight - each.scrollTop - each.clientHeight") < 5
    chat.endless()
    chat.page.evaluate("document.getElementById('thread').scrollTop = 0")
    to_end.wait_for()
    # Sending goes to the end, and reading further up while text comes in is left alone.
    chat.say("More")
    chat.until_written(300, answer=1)
    chat.page.mouse.move(700, 400)
    chat.page.mouse.wheel(0, -700)
    to_end.wait_for()
    top = chat.page.evaluate("document.getElementById('thread').scrollTop")
    length = len(chat.answers[1])
    chat.until_written(length + 500, answer=1)
    assert chat.page.evaluate("document.getElementById('thread').scrollTop") == top
    to_end.click()
    to_end.wait_for(state="hidden")
    chat.page.get_by_role("button", name="Stop").click()
    chat.until_answered()


def test_two_tabs_at_once(browse, tiny_server):
    context = browse()
    one, two = (Chat(context.new_page(), tiny_server.url).open() for _ in range(2))
    for tab in (one, two):
        tab.endless()
    one.say("From one")
    two.say("From two")
    for tab in (one, two):
        tab.until_written(100)
    assert load(tiny_server)["running"] == 2
    for tab in (one, two):
        tab.until("document.querySelectorAll('.conversation').length === 2")
        tab.page.get_by_role("button", name="Stop").click()
        tab.until_answered()
    # The same conversation in both: each sees what the other adds.
    two.open(conversation(one))
    two.page.reload()
    two.notice("Stopped.").wait_for()
    assert two.questions == ["From one"]
    assert two.answers == one.answers
    two.script(events("Seen."))
    two.say("Do you see this?")
    one.page.locator(".markdown", has_text="Seen.").wait_for()
    assert one.questions == two.questions == ["From one", "Do you see this?"]
    # And either can stop what is being made.
    two.page.unroute_all()
    two.endless()
    two.say("Go on")
    one.page.locator(".bubble", has_text="Go on").wait_for()
    one.page.get_by_role("button", name="Stop").click()
    for tab in (one, two):
        tab.until_answered()
    wait_idle(tiny_server)
    # Both answer the same message at the same time: nothing is lost, they are versions of each other.
    one.script(events("Here."))
    two.script(events("There."))
    for tab, text in ((one, "One asks"), (two, "Two asks")):
        tab.page.get_by_label("Message", exact=True).fill(text)
    for tab in (one, two):
        tab.page.keyboard.press("Enter")
    for tab in (one, two):
        tab.page.locator(".versions:visible", has_text="/ 2").wait_for()
        tab.until_answered()
    assert sorted([one.questions[-1], two.questions[-1]]) in (
        ["One asks", "Two asks"],
        ["One asks", "One asks"],
        ["Two asks", "Two asks"],
    )
    one.page.reload()
    one.page.locator(".versions:visible", has_text="/ 2").wait_for()
    # Settings of one do not undo what the other did to the same conversation.
    one.set(Temperature="0.3")
    two.page.locator("li", has_text="From one").hover()
    two.page.get_by_role("button", name="Rename From one").click()
    two.page.get_by_label("New name").fill("Ours")
    two.page.keyboard.press("Enter")
    one.page.get_by_role("heading", name="Ours").wait_for()
    for tab in (one, two):
        tab.page.reload()
        tab.page.get_by_role("heading", name="Ours").wait_for()
        tab.page.get_by_role("button", name="Settings", exact=True).click()
        assert tab.page.get_by_label("Temperature").input_value() == "0.3"


@TRANSPORTS
def test_a_key_is_asked_for(browse, tiny_model, transport):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=500",
        "--api-key=sk-right",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        context = browse()
        chat = Chat(context.new_page(), server.url)
        chat.page.goto(server.url)
        chat.page.get_by_label("API key").fill("sk-wrong")
        chat.page.keyboard.press("Enter")
        chat.page.get_by_text("The key that this page has is not valid.").wait_for()
        chat.page.get_by_label("API key").fill("sk-right")
        chat.page.keyboard.press("Enter")
        chat.until("document.getElementById('model').value === 'tiny'")
        chat.set(transport, Max_tokens="5")
        chat.say("Hi")
        chat.page.locator(".speed", has_text="5 tokens").wait_for()
        # It is kept for the tab, and in the browser only if that is wanted.
        chat.page.reload()
        chat.until("document.getElementById('model').value === 'tiny'")
        assert (
            chat.page.evaluate("Object.values(localStorage).some((value) => value.includes('sk-right'))")
            is False
        )
        # A key that stops working in mid-conversation is asked for again, and the question is not lost.
        chat.page.evaluate("sessionStorage.setItem('streamserve.key', 'sk-old')")
        chat.say("Again")
        chat.page.get_by_label("API key").fill("sk-right")
        chat.page.get_by_label("Keep it in this browser").check()
        chat.page.get_by_role("button", name="Use key").click()
        chat.until("document.querySelectorAll('.speed')[1]?.textContent.startsWith('5 tokens')")
        other = Chat(context.new_page(), server.url).open()
        assert other.titles == ["Hi"]
