"""What the check brings with it to a machine that has Python, torch and Triton, and no network:
`python -m loadtest.gpu_check.wheels FOLDER`.

Versions are those of requirements/lock.txt. Nothing is installed with its dependencies, since torch and
what only a download from a hub needs would be among them; so the list is whole.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent.parent / "requirements" / "lock.txt"
LIMIT_BYTES = 60 << 20
PYTHONS = ("3.11", "3.12")
# The platform of the images that GPUs come with, from the newest that a wheel may ask for down.
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

# Of the worker and the engine; of the frontend; and what these need in turn.
PACKAGES = (
    *("numpy", "orjson", "safetensors", "pydantic", "pyyaml"),
    *("tokenizers", "jinja2", "starlette", "sse-starlette", "uvicorn", "uvloop", "httptools", "websockets"),
    *("pydantic-core", "annotated-types", "typing-extensions", "typing-inspection", "markupsafe"),
    *("anyio", "idna", "h11", "click"),
)


def canonical(name: str) -> str:
    """A name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: Iterable[str]) -> dict[str, str]:
    """Package → version, of the lines of a lock file."""
    found = {}
    for line in lock:
        name, separator, version = line.partition("==")
        if separator and not line.startswith("#"):
            found[canonical(name)] = version.strip()
    return found


def requirements(locked: Mapping[str, str]) -> list[str]:
    """What pip is asked for.

    Raises:
        KeyError: the lock does not name a package.
    """
    return [f"{name}=={locked[canonical(name)]}" for name in PACKAGES]


def download_command(folder: Path, python: str, wanted: Iterable[str]) -> list[str]:
    """pip for the wheels of one version of Python."""
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    options = ["--no-deps", "--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    return [*command, *options, *platforms, "--dest", str(folder), *wanted]


def main(arguments: list[str]) -> int:
    """Downloads the wheels and says how large they are."""
    if arguments == ["--list"]:
        print(*requirements(pins(LOCK.read_text(encoding="utf-8").splitlines())), sep="\n")
        return 0
    if not arguments:
        print("usage: wheels FOLDER [PYTHON ...] | --list", file=sys.stderr)
        return 2
    folder, pythons = Path(arguments[0]), arguments[1:] or list(PYTHONS)
    wanted = requirements(pins(LOCK.read_text(encoding="utf-8").splitlines()))
    is_small = True
    for python in pythons:
        own = folder / python
        subprocess.run(download_command(own, python, wanted), check=True)
        size = sum(path.stat().st_size for path in own.iterdir())
        is_small = is_small and size < LIMIT_BYTES
        print(f"Python {python}: {len(wanted)} wheels, {size / 2**20:.1f} MiB in {own}")
    return 0 if is_small else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
