"""What it costs a token that its stream can be resumed.

`python -m loadtest.micro.resume`

The streams of `loadtest.micro.sse` in turns, without and with `X-Stream-Resume: 1`: each event of the latter
has an id, and is kept. The median of the ratios is printed, and what a chunk costs more. Streams that have
ended stay for their minute, so the store is full after some rounds and forgets some at each further one.
"""

from __future__ import annotations

import asyncio
import gc
import platform
import statistics
import sys

import uvloop

from loadtest.micro.sse import NUM_ROUNDS, NUM_STREAMS, Bench
from streamserve.frontend.api.app import build_app

# Half of it is the memory: bytes that stay are new ones each time.
MOST_COST = 1.6
ASK = "x-stream-resume: 1\r\n"


async def _measure() -> bool:
    """Prints rates and their ratio; returns whether it is as it should be."""
    bench = Bench()
    bench.client.start()
    bench.hello()
    while not bench.client.is_healthy:  # noqa: ASYNC110  (polled on purpose, as in the other benchmark)
        await asyncio.sleep(0)
    app = build_app(bench.service)
    plain: list[float] = []
    resumable: list[float] = []
    for _ in range(NUM_ROUNDS):
        for rates, header in ((plain, ""), (resumable, ASK)):
            gc.collect()
            rates.append(await bench.events(app, header))
    num_kept, num_bytes = len(bench.service.kept), bench.service.kept.num_bytes
    assert num_kept >= NUM_STREAMS, "the streams were not kept"
    await bench.service.kept.close()
    bench.client.stop()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"{machine}, {NUM_STREAMS} streams, {NUM_ROUNDS} rounds; {num_kept} kept, {num_bytes:,} bytes")
    for name, rates in (("plain", plain), ("resumable", resumable)):
        median = statistics.median(rates)
        spread = f"from {min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{name:>12}: {median:9,.0f} tokens/s ({spread}), {1e6 / median:.2f} µs each")
    cost = statistics.median(one / other for one, other in zip(plain, resumable, strict=True))
    more_us = statistics.median(1e6 / other - 1e6 / one for one, other in zip(plain, resumable, strict=True))
    print(f"{cost:.3f} times the time of plain, {more_us:+.2f} µs a token")
    passed = cost <= MOST_COST
    print("PASS" if passed else "FAIL", f"(bar: at most {MOST_COST:g})")
    return passed


def main() -> int:
    """Measures and reports; exit code 1 where the bar is not met."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return 0 if runner.run(_measure()) else 1


if __name__ == "__main__":
    sys.exit(main())
