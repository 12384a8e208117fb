from __future__ import annotations

import socket

import pytest

from streamserve.errors import ConfigError
from streamserve.supervisor.listener import bind, url_of


def test_port_0_is_a_real_port_that_takes_connections_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection((host, port)).close()


def test_a_second_server_on_the_port_is_refused_in_one_line() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind("127.0.0.1", port)
    assert str(caught.value) == f"--port: cannot listen on 127.0.0.1 port {port}: address already in use."


def test_a_port_whose_last_connections_linger_can_be_taken_again() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    bind("127.0.0.1", port).close()


def test_ipv6_is_written_in_brackets() -> None:
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "port", "option"),
    [
        ("127.0.0.1", 65536, "--port"),
        ("no.such.host.invalid", 0, "--host"),
        ("192.0.2.1", 0, "--host"),
        ("a" * 70, 0, "--host"),
    ],
)
def test_the_option_at_fault_is_named(host: str, port: int, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(host, port)
    assert str(caught.value).startswith(option)
