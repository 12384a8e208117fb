"""Chat templates at work: what requests may do with them, and that none holds up anybody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamserve.config import ApiConfig
from streamserve.errors import InvalidRequest
from streamserve.frontend.api.rendering import Renderer
from streamserve.frontend.text.template import CHATML, ChatTemplate, Conversation

ENDLESS = (
    "{% if messages[0].content == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)
TRUSTING = ApiConfig(trust_request_chat_template=True)


def conversation(content: str) -> Conversation:
    return Conversation([{"role": "user", "content": content}])


async def test_a_template_runs_off_the_event_loop() -> None:
    threads: list[str] = []

    class Watched(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            threads.append(threading.current_thread().name)
            return super().render(*args, **kwargs)

    renderer = Renderer(Watched(CHATML, {}))
    await renderer.render(conversation("hi"))
    assert threads
    assert threading.main_thread().name not in threads


async def test_templates_that_never_end_hold_up_nobody() -> None:
    renderer = Renderer(ChatTemplate(ENDLESS, {}), limit_s=3.0, turn_s=0.05)
    loops = [asyncio.ensure_future(renderer.render(conversation("loop"))) for _ in range(6)]
    for index in range(20):
        assert await renderer.render(conversation(str(index))) == str(index)
    assert not all(loop.done() for loop in loops)
    for error in await asyncio.gather(*loops, return_exceptions=True):
        assert isinstance(error, InvalidRequest)
        assert "longer than 3 s" in str(error)
    assert await renderer.render(conversation("after")) == "after"


async def test_what_takes_long_but_ends_is_rendered() -> None:
    source = "{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}"
    renderer = Renderer(ChatTemplate(source, {}), turn_s=0.0)
    assert await renderer.render(conversation("there")) == "there"


async def test_a_rendering_that_nobody_waits_for_ends() -> None:
    renderer = Renderer(ChatTemplate(ENDLESS, {}), limit_s=600.0, turn_s=300.0)
    for _ in range(4):
        loop = asyncio.ensure_future(renderer.render(conversation("loop")))
        await asyncio.sleep(0.01)
        loop.cancel()
        await asyncio.wait([loop])
    # Both threads are free again.
    async with asyncio.timeout(60):
        assert await renderer.render(conversation("after")) == "after"


@pytest.fixture
async def trusting(run_harness: Any) -> AsyncIterator[Any]:
    async with run_harness(api=TRUSTING, template=ENDLESS) as frontend:
        yield frontend


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_is_a_400_and_others_flow(trusting: Any, stream: bool) -> None:
    object.__setattr__(
        trusting.service, "renderer", Renderer(trusting.service.template, limit_s=1.0, turn_s=0.05)
    )
    loop = asyncio.ensure_future(trusting.chat("loop", stream=stream))
    began_s = time.monotonic()
    others = 0
    while not loop.done():
        assert (await trusting.chat("hi", max_tokens=2)).status_code == 200
        others += 1
    assert others > 1
    assert time.monotonic() - began_s < 60
    response = await loop
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")


async def test_a_requests_own_template_where_it_is_trusted(trusting: Any) -> None:
    own = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    response = await trusting.chat("hi", chat_template=own, max_tokens=1)
    assert response.status_code == 200
    assert trusting.engine.adds[0].tokens.tolist() == trusting.encode("<|im_start|>[hi]")


@pytest.mark.parametrize(
    ("template", "param", "words"),
    [
        ("{% if %}", "chat_template", "does not compile"),
        ("{% if x %}" * 3000 + "{% endif %}" * 3000, "chat_template", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "messages", "unsafe"),
        ("{% for i in range(9999) %}" + "x" * 1000 + "{% endfor %}", "messages", "characters"),
        ("{{ 9 ** 9999999 }}", "messages", "too large"),
    ],
)
async def test_what_is_wrong_with_a_requests_template(
    trusting: Any, template: str, param: str, words: str
) -> None:
    for stream in (False, True):
        response = await trusting.chat("hi", chat_template=template, stream=stream)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
    assert not trusting.engine.adds


async def test_without_trust_a_template_is_refused(frontend: Any) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"}
        response = await frontend.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_with_the_last_message(frontend: Any, events: Any, stream: bool) -> None:
    frontend.say(" there was")
    messages = [{"role": "user", "content": "A tale!"}, {"role": "assistant", "content": "Once "}]
    body = {"messages": messages, "continue_final_message": True, "stream": stream}
    response = await frontend.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    prompt = frontend.engine.adds[0].tokens.tolist()
    text = "<|im_start|>user\nA tale!<|im_end|>\n<|im_start|>assistant\nOnce "
    assert prompt == frontend.encode(text)
    if stream:
        shown = "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in events(response.text)[:-1]
        )
    else:
        shown = response.json()["choices"][0]["message"]["content"]
    assert shown == " there was"


async def test_documents_reach_a_template_that_uses_them(run_harness: Any) -> None:
    template = "{% for d in documents or [] %}{{ d.text }}|{% endfor %}{{ messages[0].content }}"
    async with run_harness(template=template) as frontend:
        await frontend.chat("hi", documents=[{"text": "a"}, {"text": "b"}], max_tokens=1)
        assert frontend.decode(frontend.engine.adds[0].tokens.tolist()) == "a|b|hi"


async def test_renderings_hold_a_place_in_the_queue(run_harness: Any) -> None:
    async with run_harness(api=TRUSTING, template=ENDLESS, max_waiting=2) as frontend:
        renderer = Renderer(frontend.service.template, limit_s=600.0, turn_s=300.0)
        object.__setattr__(frontend.service, "renderer", renderer)
        loops = [asyncio.ensure_future(frontend.chat("loop")) for _ in range(2)]
        await frontend.until(lambda: frontend.client.admission.waiting == 2)
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert (await frontend.http.post(path, json=body)).status_code == 429
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        assert (await frontend.chat("hi", max_tokens=1)).status_code == 200
