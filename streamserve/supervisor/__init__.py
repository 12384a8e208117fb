"""PROCESS 0: sockets, segments, children; starts, watches, drains, stops them. No torch, no asyncio."""

from streamserve.supervisor.process import serve

__all__ = ["serve"]
