#!/usr/bin/env bash
# What only a GPU can show, in at most eight minutes, on a machine that has Python, torch and Triton and no
# network. See docs/performance.md.
#
#   scripts/gpu_check.sh --wheels FOLDER [PYTHON ...]   on a machine with a network: downloads what to bring along,
#                                                       for these versions of Python (3.11 and 3.12)
#   scripts/gpu_check.sh [--rehearse] [--out FOLDER] [--only SECTION,...] [--seconds SECONDS]
#
# Wheels are taken from $WHEELS (gpu_wheels), results go to $OUT (gpu_check_out); fails if a check has failed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=$(realpath -m "${WHEELS:-gpu_wheels}")
out=$(realpath -m "${OUT:-gpu_check_out}")

if [ "${1:-}" = --wheels ]; then
  shift
  PYTHONPATH=$root exec "$python" -m loadtest.gpu_check.wheels "$@"
fi

path=$root
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ -d "$wheels/$version" ] && wheels=$wheels/$version
if [ -d "$wheels" ]; then
  # Beside what is installed, which stays as it is; torch and Triton are found there.
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  PYTHONPATH=$root "$python" -m loadtest.gpu_check.wheels --list > "$packages/list.txt"
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --find-links "$wheels" --target "$packages/installed" --requirement "$packages/list.txt"
  path=$path:$packages/installed
elif [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  python=$root/.venv/bin/python
fi
PYTHONPATH=$path "$python" -m loadtest.gpu_check --out "$out" "$@"
