"""Ends with 0 if the server in this container answers /health with 200, and with 1 if not.

A server that starts its engine again counts as healthy: it has streams that go on with the next one, and who
replaces the container would lose them.

The image has no curl. Port and certificate are those of the container's environment: a server that gets them
by other ways (flags, a YAML file) needs a health check of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_S = 4.0


def main(environ: Mapping[str, str]) -> int:
    """Asks once; the reason for a failure goes to stdout, where `docker inspect` finds it."""
    port = int(environ.get("STREAMSERVE_PORT", "8000"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    if environ.get("STREAMSERVE_SSL_CERTFILE"):
        # The certificate names the host that clients know, which is not this one.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        text = answer.read(1000).decode(errors="replace")
        print(answer.status, text)
    except (OSError, http.client.HTTPException) as error:
        print(error)
        return 1
    finally:
        connection.close()
    return 0 if answer.status == http.HTTPStatus.OK or is_restarting(text) else 1


def is_restarting(text: str) -> bool:
    """Whether that is what the body of an answer says."""
    try:
        said = json.loads(text)
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("status") == "restarting"


if __name__ == "__main__":
    sys.exit(main(os.environ))
