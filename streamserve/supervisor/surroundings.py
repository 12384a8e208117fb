"""What the server finds around it before it starts: variables, the network, limits of the process."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import socket

from streamserve.config import AuthConfig, unknown_variables

logger = logging.getLogger(__name__)

# A connection is a descriptor. Shells and systemd give a program 1,024 of them, and leave to take more.
WANTED_DESCRIPTORS = 65536


def warn_of_surprises(auth: AuthConfig, listener: socket.socket) -> None:
    """Logs what the operator may not have meant.

    Args:
        auth: with the keys of its files.
        listener: the socket that the server is reached at.
    """
    for sentence in unknown_variables():
        logger.warning("%s", sentence)
    host = listener.getsockname()[0]
    if not auth.api_key and not _is_loopback(host):
        logger.warning("everybody who reaches %s may use this server: it has no --api-key-file", host)


def raise_descriptor_limit() -> None:
    """Takes as many descriptors as this process may have, for itself and for its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
