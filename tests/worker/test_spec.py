"""What other rooms import from this one must not bring torch with it."""

from __future__ import annotations

import subprocess
import sys


def test_spec_and_model_config_are_torch_free() -> None:
    code = (
        "import sys, streamserve.worker.spec, streamserve.worker.models.config; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
