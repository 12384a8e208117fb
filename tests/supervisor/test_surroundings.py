from __future__ import annotations

import logging
import resource
import subprocess
import sys

import pytest

from streamserve.config import AuthConfig
from streamserve.supervisor.listener import bind
from streamserve.supervisor.surroundings import WANTED_DESCRIPTORS, warn_of_surprises


@pytest.mark.parametrize(
    ("host", "keys", "is_warned"),
    [
        ("127.0.0.1", (), False),
        ("127.1.2.3", (), False),
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("secret",), False),
    ],
)
def test_a_server_that_is_open_to_the_network_says_so(
    host: str, keys: tuple[str, ...], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with bind(host, 0) as listener:
        warn_of_surprises(AuthConfig(api_key=keys), listener)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_warned
    assert all(f"everybody who reaches {host}" in record.getMessage() for record in caplog.records)


def test_a_mistyped_variable_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSERVE_MAX_NUM_SEQ", "4")
    with bind("127.0.0.1", 0) as listener:
        warn_of_surprises(AuthConfig(), listener)
    assert "STREAMSERVE_MAX_NUM_SEQS" in caplog.text


LIMITS = """
import resource
from streamserve.supervisor.surroundings import raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_it_takes_the_descriptors_that_it_may_have() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    found = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [f"{most} {hard}", "512 512"]
