"""One token through everything: tokeniser, queue, rings, scheduler, model, detokeniser."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from streamserve.errors import StreamserveError
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import Generation
from streamserve.sampling import SamplingParams

PROBE_TEXT = "Hello"
# Before those of users, where the policy goes by that.
PROBE_PRIORITY = -(2**31)
# An answer is good for this long: whoever asks without end costs no more than one who asks now and then.
FRESH_S = 1.0


class DeepHealth:
    """Runs the probe, one at a time; those that ask meanwhile share its result.

    Args:
        service: what is probed.
        timeout_s: in which the token must have come.
    """

    def __init__(self, service: Service, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._checked_s = float("-inf")
        self._problem: str | None = None
        self._took_s = 0.0

    async def check(self) -> tuple[bool, dict[str, Any]]:
        """Whether a token came, and how long it took or what went wrong."""
        async with self._lock:
            if time.monotonic() - self._checked_s >= FRESH_S:
                await self._probe()
        if self._problem is None:
            return True, {"seconds": round(self._took_s, 6)}
        return False, {"error": self._problem}

    async def _probe(self) -> None:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._one_token()
            self._problem = None
        except TimeoutError:
            self._problem = f"No token came within {self._timeout_s:g} s."
        except StreamserveError as error:
            self._problem = str(error)
        self._checked_s = time.monotonic()
        self._took_s = self._checked_s - started_s

    async def _one_token(self) -> None:
        service = self._service
        prompt = service.tokenizer.encode(PROBE_TEXT, adds_bos=True)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        tokens: list[int] = []
        async with aclosing(
            service.client.generate(Generation(prompt, params, priority=PROBE_PRIORITY))
        ) as deltas:
            async for delta in deltas:
                tokens += delta.tokens
        service.tokenizer.tokenizer.decode(tokens)
