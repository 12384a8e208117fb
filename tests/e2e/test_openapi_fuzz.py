"""Everything that /openapi.json allows, and much that it does not: no 5xx, and every answer as it says."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest
from server import ROOT, running_server

pytestmark = pytest.mark.heavy

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
)


def test_answers_are_as_the_document_says(tiny_model, tmp_path):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=500",
        "--max-model-len=256",
        "--max-num-seqs=16",
        "--api-key=alice:sk-alice",
        "--admin-key=root:sk-root",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        engine = server.engine.pid
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{server.url}/openapi.json",
            "--header=Authorization: Bearer sk-root",
            f"--checks={','.join(CHECKS)}",
            "--phases=coverage,fuzzing",
            "--max-examples=60",
            "--request-timeout=120",
            "--continue-on-failure",
            "--no-color",
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "SCHEMATHESIS_HOOKS": "openapi_hooks"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert server.engine.pid == engine
        key = {"Authorization": "Bearer sk-alice"}
        load = httpx.get(f"{server.url}/load", headers=key, timeout=300).json()
        assert (load["running"], load["waiting"]) == (0, 0)
        assert load["free_blocks"] == load["num_blocks"]
    assert "Traceback" not in server.output
