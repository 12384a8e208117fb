"""Bytes between processes through shared memory: segments, doorbells, rings, a status board. No sockets."""
