"""The dashboard in a browser: its charts move, and it can be read and used in every way."""

from __future__ import annotations

import re
import threading

import httpx
import pytest
from browser_chat import Chat, violations

pytestmark = pytest.mark.browser


class Dashboard(Chat):
    """The page, used as people use it."""

    def open(self, address: str = "/dashboard") -> Dashboard:
        """Goes there and waits for the first numbers."""
        self.page.goto(self.url + address)
        self.page.get_by_text("Live", exact=True).wait_for()
        return self

    def values(self, chart: str) -> dict[str, str]:
        """The numbers of a chart."""
        entries = self.page.get_by_role("group", name=chart).locator(".entry:not([hidden])").all_inner_texts()
        return dict(entry.split("\n") for entry in entries)

    def slider(self, chart: str):
        """Its plot."""
        return self.page.get_by_role("slider", name=chart)


@pytest.fixture
def dashboard(browse, tiny_server) -> Dashboard:
    return Dashboard(browse().new_page(), tiny_server.url).open()


def answer(server, stopped: threading.Event) -> None:
    """Runs one generation until it is told to stop."""
    body = {"prompt": "hello", "max_tokens": 30000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
        for _ in response.iter_lines():
            if stopped.is_set():
                return


@pytest.fixture
def busy(tiny_server):
    """Something is being generated."""
    stopped = threading.Event()
    thread = threading.Thread(target=answer, args=(tiny_server, stopped))
    thread.start()
    yield tiny_server
    stopped.set()
    thread.join()


def test_charts_move_while_something_is_generated(dashboard, busy):
    dashboard.wait(lambda: dashboard.values("Requests")["running"] == "1", "the request is shown")
    dashboard.wait(lambda: dashboard.values("Tokens per second")["generated"] not in "–0", "its tokens are")
    dashboard.wait(lambda: dashboard.values("Time to first token")["p50"].endswith("s"), "its first one is")
    assert dashboard.values("Time of a step")["model"].endswith("s")
    assert set(dashboard.values("Memory")) == {"engine", "frontends", "supervisor"}
    line = dashboard.page.get_by_role("group", name="Tokens per second").locator(".line.is-line-1")
    before = line.get_attribute("d")
    dashboard.wait(lambda: line.get_attribute("d") != before, "the line goes on")
    rows = dashboard.page.locator("#processes tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["supervisor", "engine", "frontend"]


def test_what_is_selected_in_the_table_stays_selected(dashboard):
    page = dashboard.page
    page.locator("#processes td").first.evaluate("each => getSelection().selectAllChildren(each)")
    chosen = page.evaluate("getSelection().toString()")
    assert chosen.strip().isdigit()
    line = page.locator(".line").first
    before = line.get_attribute("d")
    dashboard.wait(lambda: line.get_attribute("d") != before, "the next numbers come")
    assert page.evaluate("getSelection().toString()") == chosen


def test_one_can_look_back(dashboard):
    page = dashboard.page
    dashboard.wait(
        lambda: page.locator(".line").first.get_attribute("d").count("L") >= 3, "some seconds pass"
    )
    slider = dashboard.slider("Requests")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("1 s ago", exact=True).wait_for()
    assert slider.get_attribute("aria-valuenow") == "-1"
    assert re.fullmatch(r"1 s ago: running \d+, waiting \d+", slider.get_attribute("aria-valuetext"))
    assert page.locator(".cursor[d^=M]").count() == page.locator(".chart").count()
    page.keyboard.press("End")
    page.get_by_text("Live", exact=True).wait_for()
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 10)
    page.get_by_text(re.compile(r"^\d+ s ago$")).wait_for()
    page.mouse.move(1, 1)
    page.get_by_text("Live", exact=True).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browse, tiny_server, scheme, width):
    context = browse(color_scheme=scheme, viewport={"width": width, "height": 844})
    dashboard = Dashboard(context.new_page(), tiny_server.url).open()
    assert violations(dashboard.page) == []
    assert dashboard.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    dashboard.page.route("**/dashboard/events", lambda route: route.fulfill(status=401, body="{}"))
    dashboard.page.reload()
    dashboard.page.get_by_label("API key").wait_for()
    assert violations(dashboard.page) == []


def test_the_key_is_that_of_the_chat_page(dashboard):
    page, keys = dashboard.page, []

    def ask(route) -> None:
        keys.append(route.request.headers.get("authorization"))
        if keys[-1] == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, body="{}")

    page.route("**/dashboard/events", ask)
    page.reload()
    page.get_by_label("API key").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Enter key").click()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use key").click()
    page.get_by_text("The key that this page has is not valid.").wait_for()
    page.get_by_label("API key").fill("right")
    page.get_by_role("button", name="Use key").click()
    page.get_by_text("Live", exact=True).wait_for()
    assert keys == [None, None, "Bearer wrong", "Bearer right"]
    assert page.evaluate("sessionStorage.getItem('streamserve.key')") == "right"


def test_it_comes_back_when_the_server_does(dashboard):
    page = dashboard.page
    page.route("**/dashboard/events", lambda route: route.fulfill(status=503, body="{}"))
    page.route("**/ready", lambda route: route.fulfill(status=503, body='{"status": "loading"}'))
    page.reload()
    page.get_by_text("The server is starting.").wait_for()
    page.get_by_text("Not connected").wait_for()
    page.unroute_all()
    page.get_by_text("Live", exact=True).wait_for()
    assert page.locator("#banner").inner_text() == ""


def test_the_pages_lead_to_each_other(dashboard):
    page = dashboard.page
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("link", name="Dashboard").click()
    page.get_by_role("slider", name="Requests").wait_for()
    # A page that is turned off is not linked.
    page.route(re.compile(r"/$"), lambda route: route.fulfill(status=404))
    with page.expect_response(lambda response: response.status == 404):
        page.reload()
    page.get_by_text("Live", exact=True).wait_for()
    assert page.get_by_role("link", name="Chat").count() == 0
