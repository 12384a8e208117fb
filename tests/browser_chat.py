"""The chat page in a browser, for the tests that use it as people do."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from server import PATIENCE_S

LIMIT_MS = PATIENCE_S * 1000
# A name of this machine for which browsers have fewer functions, as they do for all that has no HTTPS.
PLAIN_HOST = "plain.test"

# Done once a page, between the page's scripts and the network.
IGNORE_EOS = """
(() => {
  if (window.ignoresEos) return;
  window.ignoresEos = true;
  const { fetch } = window;
  window.fetch = (url, options) => {
    if (!String(url).includes("/v1/chat/completions")) return fetch(url, options);
    const body = { ...JSON.parse(options.body), ignore_eos: true };
    return fetch(url, { ...options, body: JSON.stringify(body) });
  };
  const { send } = WebSocket.prototype;
  WebSocket.prototype.send = function (text) {
    const said = JSON.parse(text);
    if (said.type === "create") said.body.ignore_eos = true;
    send.call(this, JSON.stringify(said));
  };
})()
"""

STORED_ANSWERS = """
async () => {
  const request = indexedDB.open("streamserve");
  const database = await new Promise((done) => (request.onsuccess = () => done(request.result)));
  const all = database.transaction("messages").objectStore("messages").getAll();
  await new Promise((done) => (all.onsuccess = done));
  database.close();
  return all.result.filter((message) => message.role === "assistant").map((message) => message.content);
}
"""


def events(*texts: str, finish: str | None = "stop", tokens: bool = False) -> bytes:
    """An answer of chunks as server-sent events; without an end if it finishes for no reason."""
    chunks: list[dict[str, Any]] = []
    for number, text in enumerate(texts, 1):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        if tokens:
            likely = [{"token": text, "logprob": -0.1}, {"token": "other", "logprob": -3.0}]
            choice["logprobs"] = {"content": [{"token": text, "logprob": -0.1, "top_logprobs": likely}]}
        chunks.append({"choices": [choice], "usage": {"completion_tokens": number}})
    if finish is not None:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return (body + ("data: [DONE]\n\n" if finish is not None else "")).encode()


def violations(page: Any) -> list[str]:
    """What axe finds, however minor."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']} ({each['impact']}): {node['html']}" for each in found for node in each["nodes"]]


class Answer:
    """An answer over a WebSocket, which comes as the test says.

    Args:
        route: of Playwright.
        id: of the stream on it.
    """

    def __init__(self, route: Any, id: int) -> None:
        self._route = route
        self._id = id

    def write(self, text: str) -> None:
        """Adds to it."""
        chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
        self._route.send(json.dumps({"id": self._id, "type": "chunk", "chunk": chunk}))

    def end(self) -> None:
        """Says that it is whole."""
        self._route.send(json.dumps({"id": self._id, "type": "done"}))


class Chat:
    """The chat page in a browser, used as people use it.

    Args:
        page: of Playwright.
        url: of the server.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url

    def open(self, address: str = "/") -> Chat:
        """Goes there and waits until the page knows the server's model."""
        self.page.goto(self.url + address)
        self.until("document.getElementById('model').value !== ''")
        return self

    def wait(self, condition: Any, what: str) -> None:
        """Polls until `condition()` holds, while the browser's own events are attended to."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}"
            self.page.wait_for_timeout(20)

    def until(self, expression: str) -> None:
        """Waits until it is true on the page (whose policy keeps Playwright's own way from working)."""
        self.wait(lambda: self.page.evaluate(expression), expression)

    def until_written(self, num_chars: int, answer: int = 0) -> None:
        """Waits until an answer is longer than that."""
        shown = f"document.querySelectorAll('.markdown')[{answer}]"
        self.until(f"({shown}?.innerText.length ?? 0) > {num_chars}")

    def say(self, text: str) -> None:
        """Types a message and sends it."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")
        self.wait(lambda: self.questions[-1:] and self.questions[-1][:99] == text[:99].strip(), "it is shown")

    def script(self, *answers: bytes, status: int = 200, headers: dict[str, str] | None = None) -> list[Any]:
        """Answers the next chat requests with these bodies, and all after them as the server does.

        Returns:
            The bodies of all chat requests, as they come.
        """
        asked, left = [], list(answers)

        def answer(route: Any) -> None:
            asked.append(route.request.post_data_json)
            if not left:
                route.continue_()
                return
            kind = {"Content-Type": "text/event-stream" if status == 200 else "application/json"}
            route.fulfill(status=status, headers={**kind, **(headers or {})}, body=left.pop(0))

        self.page.unroute_all()
        self.page.route("**/v1/chat/completions", answer)
        return asked

    def endless(self) -> None:
        """Has answers go on to their limit, if there is one, whatever the model says, over both transports.

        A model of random weights may end its answer at any token.
        """
        self.page.evaluate(IGNORE_EOS)
        self.page.add_init_script(IGNORE_EOS)

    def set(self, transport: str | None = None, chances: bool | None = None, **fields: str) -> None:
        """Changes settings: the transport, whether probabilities are wanted, fields by their label.

        With a greatest length, answers are that long.
        """
        if fields.get("Max_tokens"):
            self.endless()
        self.page.get_by_role("button", name="Settings", exact=True).click()
        if transport is not None:
            self.page.get_by_label(transport).check()
        if chances is not None:
            self.page.get_by_label("Ask for token probabilities").set_checked(chances)
        for name, value in fields.items():
            self.page.get_by_label(name.replace("_", " "), exact=True).fill(value)
        self.page.get_by_role("button", name="Close settings").click()

    def until_answered(self) -> None:
        """Waits until no answer is being made."""
        self.page.get_by_role("button", name="Send", exact=True).wait_for()
        self.until("!document.querySelector('[aria-busy=true]')")

    def notice(self, text: str) -> Any:
        """What the page says under an answer or above the message box."""
        return self.page.locator(".notice", has_text=text)

    def steer(self, question: str) -> Answer:
        """Asks over the WebSocket, for an answer that the test writes piece by piece."""
        asked: list[tuple[Any, Any]] = []
        self.page.route_web_socket(
            "**/v1/ws",
            lambda route: route.on_message(lambda said: asked.append((route, json.loads(said)))),
        )
        self.set("WebSocket")
        self.say(question)
        self.wait(lambda: asked, "it is asked")
        route, create = asked[0]
        return Answer(route, create["id"])

    @property
    def answers(self) -> list[str]:
        """The texts of the answers that are shown."""
        return self.page.locator(".is-assistant .markdown").all_inner_texts()

    @property
    def stored_answers(self) -> list[str]:
        """The texts of all answers that the browser keeps, as the model wrote them."""
        return self.page.evaluate(STORED_ANSWERS)

    @property
    def questions(self) -> list[str]:
        """The texts of the questions that are shown."""
        return self.page.locator(".bubble").all_inner_texts()

    @property
    def titles(self) -> list[str]:
        """The conversations in the list."""
        return self.page.locator(".conversation").all_inner_texts()
