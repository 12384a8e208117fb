"""The chat page when the server is busy, starts or goes away, and when a model writes what it should not."""

from __future__ import annotations

import json

import pytest
from browser_chat import Chat, events
from server import wait_idle

pytestmark = pytest.mark.browser

BUSY = b'{"error": {"message": "Too many requests wait.", "code": "overloaded"}}'
LOADING = b'{"error": {"message": "The model is loading.", "code": "engine_unavailable"}}'


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(chat, status):
    asked = chat.script(BUSY, status=status, headers={"Retry-After": "1"})
    chat.set(Max_tokens="5")
    chat.say("Hi")
    chat.notice("The server is busy. Trying again in 1 s.").wait_for()
    chat.page.locator(".speed", has_text="5 tokens").wait_for()
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_a_busy_server_can_be_asked_at_once_or_left_alone(chat):
    asked = chat.script(BUSY, BUSY, status=429, headers={"Retry-After": "3000"})
    chat.set(Max_tokens="5")
    chat.say("Hi")
    chat.page.get_by_role("button", name="Try now").click()
    chat.wait(lambda: len(asked) == 2, "it was asked again")
    chat.notice("The server is busy.").wait_for()
    chat.page.get_by_role("button", name="Stop").click()
    chat.until_answered()
    chat.notice("Stopped.").wait_for()
    chat.page.get_by_role("button", name="Try again").click()
    chat.page.locator(".speed", has_text="5 tokens").wait_for()


def test_the_socket_tells_of_a_busy_server_too(chat):
    turned_down = []

    def over_socket(route):
        server = route.connect_to_server()

        def pass_on(message):
            said = json.loads(message)
            if turned_down:
                server.send(message)
                return
            turned_down.append(said)
            error = {"message": "Too many.", "code": "overloaded", "status": 429, "retry_after": 1}
            route.send(json.dumps({"id": said["id"], "type": "error", "error": error}))

        route.on_message(pass_on)

    chat.page.route_web_socket("**/v1/ws", over_socket)
    chat.set("WebSocket", Max_tokens="5")
    chat.say("Hi")
    chat.notice("The server is busy. Trying again in 1 s.").wait_for()
    chat.page.locator(".speed", has_text="5 tokens").wait_for()


def test_a_server_that_starts_is_waited_for(chat):
    progress = {"status": "loading", "progress": {"stage": "loading weights", "fraction": 0.42}}
    loading = {"status": 503, "body": json.dumps(progress), "content_type": "application/json"}
    chat.page.route("**/ready", lambda route: route.fulfill(**loading))
    chat.page.route("**/v1/models", lambda route: route.fulfill(status=503, body=LOADING.decode()))
    chat.page.reload()
    chat.notice("The server is starting.").wait_for()
    chat.page.get_by_text("loading weights 42 %").wait_for()
    chat.page.unroute_all()
    chat.until("document.getElementById('model').value === 'tiny'")
    assert chat.page.locator("#banner").inner_text() == ""
    # The same in the middle of a conversation.
    asked = chat.script(LOADING, status=503)
    chat.page.route("**/ready", lambda route: route.fulfill(**loading))
    chat.set(Max_tokens="5")
    chat.say("Hi")
    chat.page.get_by_text("loading weights 42 %").wait_for()
    chat.page.unroute("**/ready")
    chat.page.locator(".speed", has_text="5 tokens").wait_for()
    assert len(asked) == 2


@pytest.mark.parametrize("transport", ["Server-sent events", "WebSocket"])
def test_a_lost_connection_keeps_what_had_come(chat, tiny_server, transport):
    chat.endless()
    chat.set(transport)
    chat.say("Go on.")
    chat.until_written(200)
    tiny_server.frontend.kill()
    chat.notice("The connection was lost before the answer was whole.").wait_for()
    text = chat.answers[0]
    assert len(text) > 200
    # Another frontend takes its place; until then the page waits. The answer goes on in the same message.
    chat.page.get_by_role("button", name="Continue").click()
    chat.until_written(len(text) + 100)
    assert chat.answers[0].startswith(text[:150])
    chat.page.get_by_role("button", name="Stop").click()
    chat.until_answered()
    wait_idle(tiny_server)


def test_an_error_in_the_middle_is_told(chat):
    error = b'data: {"error": {"message": "The engine died.", "code": "engine_unavailable"}}\n\n'
    chat.script(events("Half an ", finish=None) + error)
    chat.say("Hi")
    chat.page.locator(".notice", has_text="The engine died.").wait_for()
    assert chat.answers == ["Half an"]
    assert chat.page.get_by_role("button", name="Continue").is_visible()


def test_an_answer_that_is_cut_at_its_length_can_go_on(chat):
    chat.set(Max_tokens="10")
    chat.say("Hi")
    chat.notice("The answer came to its greatest length.").wait_for()
    chat.page.get_by_role("button", name="Continue").click()
    chat.page.locator(".speed", has_text="20 tokens").wait_for()


def test_a_socket_that_does_not_open_can_be_given_up(browse, tiny_server):
    page = browse().new_page()
    page.add_init_script("window.WebSocket = class extends EventTarget { readyState = 0; close() {} }")
    chat = Chat(page, tiny_server.url).open()
    chat.set("WebSocket")
    chat.say("Hi")
    chat.page.get_by_role("button", name="Stop").click()
    chat.notice("Stopped.").wait_for()


def test_a_key_that_cannot_be_sent_is_said_to_be_wrong(browse, tiny_server):
    wanted = []

    def answer(route):
        wanted.append(route.request.headers.get("authorization"))
        if wanted[-1] is None:
            route.fulfill(status=401, body="{}")
        else:
            route.continue_()

    chat = Chat(browse().new_page(), tiny_server.url)
    chat.page.route("**/v1/models", answer)
    chat.page.goto(tiny_server.url)
    box = chat.page.get_by_label("API key")
    for impossible in ("sk-\u2026", "sk-\u200babc", "two words", "\u043a\u043b\u044e\u0447"):
        box.fill(impossible)
        chat.page.keyboard.press("Enter")
        assert "Copy it again" in box.evaluate("each => each.validationMessage")
    assert wanted == [None]
    # One that is kept from elsewhere is asked for anew.
    chat.page.evaluate("sessionStorage.setItem('streamserve.key', '\u043a\u043b\u044e\u0447')")
    chat.page.reload()
    box.fill("  sk-a/b+c==  ")
    chat.page.keyboard.press("Enter")
    chat.until("document.getElementById('model').value === 'tiny'")
    assert wanted[-1] == "Bearer sk-a/b+c=="
    # Browsers do not take it over a WebSocket.
    chat.set("WebSocket", Max_tokens="5")
    chat.say("Hi")
    chat.notice("cannot send this key over a WebSocket").wait_for()
    chat.set("Server-sent events")
    chat.page.get_by_role("button", name="Try again").click()
    chat.page.locator(".speed", has_text="5 tokens").wait_for()


EVIL = """Before <img src="https://evil.example/a.png" onerror="window.hit=1"> <script>window.hit = 2</script>

<svg onload="window.hit = 3"></svg><iframe src="javascript:window.hit = 4"></iframe>

![image](https://evil.example/b.png) ![x](x" onerror="window.hit=5) [link](javascript:window.hit=6)
[data](data:text/html,<script>window.hit=7</script>) [relative](/v1/streams) <javascript:window.hit=8>

<a href="javascript:window.hit=9" onclick="window.hit=10">a</a>
<form action="https://evil.example"><button>b</button></form>

<style>body { display: none }</style> <base href="https://evil.example/">
<math><mi xlink:href="javascript:1">m</mi></math>

```html"><img src=x onerror=window.hit=11>
<img src=x onerror=window.hit=12>
```

| <img src=x onerror=window.hit=13> |
| --- |
| `<img src=x onerror=window.hit=14>` |

[good](https://example.org/page) after"""


def test_what_a_model_writes_does_nothing(chat):
    requests = []
    chat.page.on("request", lambda request: requests.append(request.url))
    # In pieces, so that each is drawn half as well.
    pieces = [EVIL[start : start + 7] for start in range(0, len(EVIL), 7)]
    chat.script(events(*pieces, tokens=True))
    chat.say(EVIL)
    chat.page.get_by_text("after", exact=False).last.wait_for()
    chat.until_answered()
    chat.page.get_by_role("button", name="Show probabilities").click()
    links = chat.page.locator(".markdown a")
    hrefs = links.evaluate_all("all => all.map((each) => each.getAttribute('href'))")
    assert hrefs == ["https://evil.example/b.png", "https://example.org/page"]
    assert links.last.get_attribute("rel") == "noopener noreferrer nofollow"
    assert links.last.get_attribute("target") == "_blank"
    acting = "img, script, svg:not(.icon), iframe, form, style, base, math, object, embed, audio, video"
    assert chat.page.locator(f".markdown :is({acting})").count() == 0
    attributes = chat.page.locator(".markdown *").evaluate_all(
        "all => all.flatMap((each) => [...each.attributes].map((one) => one.name))"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "id", "src")]
    # All of it is still there to read.
    assert "<img src=x onerror=window.hit=12>" in chat.page.locator(".code code").inner_text()
    assert "<script>window.hit = 2</script>" in chat.answers[0]
    assert chat.page.evaluate("window.hit") is None
    assert {url for url in requests if not url.startswith((chat.url, "blob:"))} == set()


def test_the_policy_stops_what_gets_past(chat, complaints):
    """As if the sanitiser had failed: markup of an attacker in the page itself."""
    refused = chat.page.evaluate(
        """async () => {
          const results = {};
          try {
            document.body.insertAdjacentHTML("beforeend", "<b>x</b>");
            results.markup = "taken";
          } catch { results.markup = "refused"; }
          const inline = document.createElement("button");
          try { inline.setAttribute("onclick", "window.hit = 1"); } catch {}
          document.body.append(inline);
          inline.click();
          const script = document.createElement("script");
          try { script.src = "https://evil.example/x.js"; } catch { results.script = "refused"; }
          const image = new Image();
          results.image = await new Promise((done) => {
            image.onload = () => done("loaded");
            image.onerror = () => done("refused");
            image.src = "https://evil.example/x.png";
          });
          results.fetch = await fetch("https://evil.example/").then(() => "sent", () => "refused");
          results.hit = window.hit ?? null;
          return results;
        }"""
    )
    assert refused == {
        "markup": "refused",
        "script": "refused",
        "image": "refused",
        "fetch": "refused",
        "hit": None,
    }
    assert [line for line in complaints if "Content Security Policy" in line]
    complaints.clear()
