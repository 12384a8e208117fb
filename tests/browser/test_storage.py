"""The chat page where the browser keeps nothing, has no room, or has kept what nobody can read."""

from __future__ import annotations

import pytest
from browser_chat import Chat, events

pytestmark = pytest.mark.browser

KEEPS_NOTHING = """
LockManager.prototype.request = async () => { throw new DOMException("denied", "SecurityError"); };
for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}
"""
# Room is asked for when a transaction is committed, and each put by itself has been taken by then.
NO_ROOM = """
const put = IDBObjectStore.prototype.put;
window.isFull = true;
IDBObjectStore.prototype.put = function (record) {
  const request = put.call(this, record);
  if (window.isFull) {
    const { transaction } = this;
    request.onerror = (event) => event.preventDefault();
    transaction.commit = () => {};
    Object.defineProperty(transaction, "error", { value: new DOMException("full", "QuotaExceededError") });
    queueMicrotask(() => transaction.abort());
  }
  return request;
};
const setItem = Storage.prototype.setItem;
Storage.prototype.setItem = function (name, value) {
  if (window.isFull) throw new DOMException("full", "QuotaExceededError");
  setItem.call(this, name, value);
};
"""


def opened(browse, server, script: str = "") -> Chat:
    """The page in a browser of its own that runs a script before the page's."""
    page = browse().new_page()
    if script:
        page.add_init_script(script)
    return Chat(page, server.url).open()


@pytest.mark.parametrize(
    ("script", "said"), [(KEEPS_NOTHING, "keeps nothing for this page"), (NO_ROOM, "no more room")]
)
def test_the_page_works_where_nothing_can_be_kept(browse, tiny_server, script, said):
    chat = opened(browse, tiny_server, script)
    chat.script(events("One."), events("Two."), events("Three."))
    chat.say("First")
    chat.until_answered()
    chat.page.get_by_text(said).wait_for()
    chat.say("Second")
    chat.until_answered()
    assert chat.answers == ["One.", "Two."]
    # Another conversation, and back: all is there while the page is.
    chat.page.get_by_role("button", name="New chat").click()
    chat.say("Third")
    chat.until_answered()
    assert chat.titles == ["Third", "First"]
    chat.page.get_by_role("button", name="First", exact=True).click()
    chat.page.locator(".markdown", has_text="Two.").wait_for()
    assert chat.answers == ["One.", "Two."]
    chat.page.get_by_role("button", name="Rename First").click()
    chat.page.get_by_label("New name").fill("Begun")
    chat.page.keyboard.press("Enter")
    chat.page.get_by_role("heading", name="Begun").wait_for()
    chat.page.locator("li", has_text="Third").hover()
    chat.page.get_by_role("button", name="Delete Third").click()
    chat.until("document.querySelectorAll('.conversation').length === 1")
    # Settings hold as well, and so does the theme.
    chat.set("WebSocket", Temperature="0.5")
    chat.page.get_by_role("button", name="Settings", exact=True).click()
    assert chat.page.get_by_label("WebSocket").is_checked()
    assert chat.page.get_by_label("Temperature").input_value() == "0.5"
    chat.page.keyboard.press("Escape")
    chat.page.locator("#theme").click()
    assert chat.page.locator("#theme").inner_text().endswith("Light")


def test_what_had_no_room_is_kept_once_there_is_some(browse, tiny_server):
    chat = opened(browse, tiny_server, NO_ROOM)
    chat.script(events("One."), events("Two."))
    chat.say("First")
    chat.until_answered()
    chat.page.get_by_text("no more room").wait_for()
    chat.page.evaluate("window.isFull = false")
    chat.say("Second")
    chat.until_answered()
    chat.page.get_by_text("no more room").wait_for(state="detached")
    # By a page that holds nothing itself.
    page = chat.page.context.new_page()
    page.goto(tiny_server.url)
    texts = page.evaluate(
        """async () => {
          const request = indexedDB.open("streamserve");
          const database = await new Promise((done) => (request.onsuccess = () => done(request.result)));
          const all = database.transaction("messages").objectStore("messages").getAll();
          await new Promise((done) => (all.onsuccess = done));
          return all.result.map((message) => message.content);
        }"""
    )
    assert sorted(texts) == ["First", "One.", "Second", "Two."]


@pytest.mark.parametrize(
    "preferences",
    ["{", "null", "[]", '{"transport": "pigeon", "sampling": 5, "system": {}, "isSidebarShown": "x"}'],
)
def test_preferences_that_make_no_sense_are_left_out(browse, tiny_server, preferences):
    page = browse().new_page()
    page.goto(tiny_server.url)
    page.evaluate("(text) => localStorage.setItem('streamserve.preferences', text)", preferences)
    page.evaluate("localStorage.setItem('streamserve.theme', 'plaid')")
    chat = Chat(page, tiny_server.url).open()
    chat.set(Temperature="0")
    asked = chat.script(events("Yes."))
    chat.say("Hi")
    chat.until_answered()
    assert asked[0]["temperature"] == 0
    assert chat.page.locator("#theme").inner_text().endswith("System")


def test_records_that_make_no_sense_are_mended_or_left_out(browse, tiny_server):
    chat = opened(browse, tiny_server)
    chat.script(events("One."))
    chat.say("First")
    chat.until_answered()
    # As another version of the page, or somebody with the developer's tools, may have left it.
    chat.page.evaluate(
        """async () => {
          const request = indexedDB.open("streamserve");
          const database = await new Promise((done) => (request.onsuccess = () => done(request.result)));
          const both = database.transaction(["conversations", "messages"], "readwrite");
          const conversations = both.objectStore("conversations");
          const messages = both.objectStore("messages");
          conversations.put({ id: "a" });
          conversations.put({ id: "b", title: { no: 1 }, sampling: null, deletedAt: null, leaf: 7 });
          conversations.put({ id: 5 });
          messages.put({ id: "c", conversation: "b", parent: "gone", role: "user", content: 7 });
          messages.put({ id: "d", conversation: "b", parent: "c", role: "assistant", content: "<b>x</b>",
            state: "<i>", chances: [{}, 5], speed: {} });
          messages.put({ id: "e", conversation: "b", parent: "d", role: "system" });
          await new Promise((done) => (both.oncomplete = done));
        }"""
    )
    chat.page.reload()
    chat.until("document.querySelectorAll('.conversation').length === 3")
    assert chat.titles[0] == "First"
    chat.page.locator(".conversation").nth(1).click()
    chat.page.locator(".conversation").nth(2).click()
    chat.until("document.querySelector('.conversation[aria-current]') !== null")
    for number in (1, 2):
        chat.page.locator(".conversation").nth(number).click()
        chat.until(f"document.querySelectorAll('li')[{number}].classList.contains('is-current')")
    chat.page.goto(f"{chat.url}/#/b")
    chat.page.locator(".markdown", has_text="<b>x</b>").wait_for()
    chat.script(events("Still works."))
    chat.say("Hi")
    chat.page.locator(".markdown", has_text="Still works.").wait_for()
    chat.until_answered()
