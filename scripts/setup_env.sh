#!/usr/bin/env bash
# Makes the virtual environment that this checkout needs, or finds the one that is there, and points .venv at it.
#
#   scripts/setup_env.sh [serve] [test] [check] [bench] [clients] [browser] [loadtest] [deploy]
#
# Environments live outside the checkout, named by a hash of the dependencies and the Python version:
# several checkouts share one, and a change of dependencies makes a new one. Settings, all optional:
#   PYTHON                  interpreter to build on (3.11 to 3.13)
#   STREAMSERVE_VENV_HOME   where the environments live
#   STREAMSERVE_TORCH       what to ask pip for instead of the CPU build of PyTorch, e.g. torch for the CUDA build
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
  # PYTHONPATH is dropped so that the environment never depends on the caller's.
  if command -v "$candidate" >/dev/null \
    && env -u PYTHONPATH "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    exec env -u PYTHONPATH "$candidate" "$root/scripts/setup_env.py" "$@"
  fi
done

echo "error: streamserve needs Python 3.11, 3.12 or 3.13; name one with PYTHON=/path/to/python" >&2
exit 1
