"""A server that streams completions of made-up words, and can be told to do it wrong.

Run as a program: `fake_server.py --port N [flags]`. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys


class FakeServer:
    """Answers /health and /v1/completions.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.not_ready_yet = options.not_ready

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get /health"):
                self.answer_health(writer)
            else:
                length = int(head.partition("content-length:")[2].split()[0])
                await self.complete(json.loads(await reader.readexactly(length)), writer)
            await writer.drain()
        writer.close()

    def answer_health(self, writer: asyncio.StreamWriter) -> None:
        status = "503 Service Unavailable" if self.not_ready_yet > 0 else "200 OK"
        self.not_ready_yet -= 1
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

    async def complete(self, request: dict, writer: asyncio.StreamWriter) -> None:
        if self.options.refuse and request["max_tokens"] > 8:
            body = b'{"error": "too much"}'
            writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        # Short of what was asked for, but not in the first request and not while warming up.
        short = self.options.short if request["max_tokens"] > 8 else 0
        count = request["max_tokens"] - short
        for number in range(count):
            write_event(writer, {"choices": [{"index": 0, "text": f" word{number}"}]})
            await writer.drain()
            await asyncio.sleep(0)
        if self.options.usage:
            usage = {"prompt_tokens": len(request["prompt"].split()), "completion_tokens": count}
            write_event(writer, {"choices": [], "usage": usage})
        write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def write_event(writer: asyncio.StreamWriter, event: dict) -> None:
    write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--not-ready", type=int, default=0, help="so many questions are answered 503")
    parser.add_argument("--short", type=int, default=0, help="so many tokens are missing")
    parser.add_argument("--no-usage", dest="usage", action="store_false")
    parser.add_argument("--refuse", action="store_true", help="answer 429 to what is measured")
    parser.add_argument("--broken", action="store_true", help="end before being ready")
    parser.add_argument("--child", action="store_true", help="have a child that never ends by itself")
    return parser.parse_args()


async def serve(options: argparse.Namespace) -> None:
    server = await asyncio.start_server(FakeServer(options).serve, "127.0.0.1", options.port)
    async with server:
        await server.serve_forever()


def main() -> None:
    options = parse()
    if options.broken:
        sys.exit("cannot find the model")
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
