"""HTTPS from files."""

from __future__ import annotations

import ssl

from streamserve.config import TlsConfig
from streamserve.errors import ConfigError

_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """What connections are secured with; None for plain HTTP.

    Raises:
        ConfigError: a file cannot be read or does not hold what it should; names the option.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _check_readable("--ssl-certfile", config.ssl_certfile)
    key_option = "--ssl-certfile"
    if config.ssl_keyfile is not None:
        key_option = "--ssl-keyfile"
        _check_readable(key_option, config.ssl_keyfile)

    def refuse_passphrase() -> str:
        # Without this, OpenSSL asks the terminal, and the server waits for an answer for ever.
        raise ConfigError(f"{key_option}: the private key has a passphrase; give one without.")

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, refuse_passphrase)
    except (OSError, ValueError) as error:
        given = f"--ssl-certfile {config.ssl_certfile}"
        given += f", --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile is not None else ""
        raise ConfigError(f"{given}: not a certificate and its private key in PEM ({error}).") from error
    if config.ssl_ca_certs is not None:
        _check_readable("--ssl-ca-certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ssl_ca_certs}: no certificates in PEM ({error})."
            ) from error
    context.verify_mode = _VERIFY[config.ssl_cert_reqs]
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"--ssl-ciphers: OpenSSL knows no cipher of {config.ssl_ciphers!r}.") from error
    return context


def _check_readable(option: str, path: str) -> None:
    # What OpenSSL says of a file that it cannot open does not name the file.
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror}.") from error
