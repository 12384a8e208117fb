"""HTTPS without a proxy."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from websockets.asyncio.client import connect

from streamserve.config import TlsConfig
from streamserve.errors import ConfigError
from streamserve.frontend.tls import server_context

WAIT_S = 60.0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[trustme.CA, TlsConfig]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    key_file, chain_file = tmp_path / "key.pem", tmp_path / "chain.pem"
    issued.private_key_pem.write_to_path(key_file)
    for pem in issued.cert_chain_pems:
        pem.write_to_path(chain_file, append=True)
    return authority, TlsConfig(ssl_keyfile=str(key_file), ssl_certfile=str(chain_file))


async def test_https(frontend: Any, certificate: tuple[trustme.CA, TlsConfig]) -> None:
    authority, tls = certificate
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with frontend.served(tls=tls) as plain_url:
        url = plain_url.replace("http:", "https:")
        async with httpx.AsyncClient(base_url=url, verify=trust, timeout=WAIT_S) as http:
            assert (await http.get("/health")).status_code == 200
            body = {"prompt": "hello", "max_tokens": 3, "stream": True}
            assert (await http.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")
        async with connect(url.replace("https", "wss") + "/v1/ws", ssl=trust) as socket:
            await socket.send('{"type":"ping"}')
            assert json.loads(await socket.recv()) == {"type": "pong"}
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(timeout=WAIT_S) as stranger:
                await stranger.get(url)


def test_no_certificate_is_no_https() -> None:
    assert server_context(TlsConfig()) is None


def test_client_certificates_can_be_required(
    certificate: tuple[trustme.CA, TlsConfig], tmp_path: Path
) -> None:
    authority, tls = certificate
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = server_context(
        TlsConfig(tls.ssl_keyfile, tls.ssl_certfile, str(tmp_path / "ca.pem"), "required", "ECDHE+AESGCM")
    )
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssl_certfile": "/nowhere/x.pem"}, "--ssl-certfile: cannot read /nowhere/x.pem: No such file"),
        ({"ssl_keyfile": "/nowhere/x.pem"}, "--ssl-keyfile: cannot read /nowhere/x.pem"),
        ({"ssl_keyfile": __file__}, "--ssl-keyfile"),
        ({"ssl_ca_certs": "/nowhere/x.pem"}, "--ssl-ca-certs: cannot read"),
        ({"ssl_ca_certs": __file__}, "--ssl-ca-certs"),
        ({"ssl_ciphers": "NONE-SUCH"}, "--ssl-ciphers"),
    ],
)
def test_files_that_are_no_use_are_named(
    certificate: tuple[trustme.CA, TlsConfig], changes: dict[str, str], words: str
) -> None:
    tls = certificate[1]
    options: dict[str, Any] = {"ssl_keyfile": tls.ssl_keyfile, "ssl_certfile": tls.ssl_certfile, **changes}
    with pytest.raises(ConfigError, match=words):
        server_context(TlsConfig(**options))


def test_a_passphrase_is_not_asked_for(certificate: tuple[trustme.CA, TlsConfig], tmp_path: Path) -> None:
    """OpenSSL would ask the terminal, and nobody be told why the server does not start."""
    _, tls = certificate
    assert tls.ssl_keyfile is not None
    key = serialization.load_pem_private_key(Path(tls.ssl_keyfile).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="--ssl-keyfile: the private key has a passphrase"):
        server_context(TlsConfig(str(locked), tls.ssl_certfile))
