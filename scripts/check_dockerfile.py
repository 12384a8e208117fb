"""Builds a target of the Dockerfile without a container engine, and looks whether what comes out serves.

Each stage is a folder that begins as a copy of a Debian root. Instructions are carried out in it with chroot;
then the server is started as the image's user, on a root that it cannot write to and without /dev/shm. The
image's own health check is run until it is content, and SIGTERM must end the server with 0. All mounts end
with the process: check_dockerfile.sh calls it in a mount namespace of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile import Dockerfile, Instruction, Stage, expand, is_ignored

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ("null", "zero", "random", "urandom")
PATIENCE_S = 900.0
# What else on this machine pip needs to know; names of variables, whose values are passed on.
PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
             "http_proxy", "https_proxy", "no_proxy")  # fmt: skip


@dataclass
class Image:
    """A stage as far as it is built."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    def popen(self, command: Sequence[str], extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts `command` in it."""
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", **self.env, **extra}
        inside = ["/bin/sh", "-c", f'cd "{self.workdir}" && exec "$@"', "sh", *command]
        return subprocess.Popen(["chroot", f"--userspec={self.user}", str(self.root), *inside], env=env)

    def run(self, command: Sequence[str], extra: Mapping[str, str]) -> int:
        """Runs `command` in it to its end."""
        return self.popen(command, extra).wait()


class Builder:
    """Carries out a Dockerfile.

    Args:
        dockerfile: what to do.
        work: folder for the roots.
        base: a root of the Debian release of the base image, with its Python.
    """

    def __init__(self, dockerfile: Dockerfile, work: Path, base: Path) -> None:
        self._dockerfile = dockerfile
        self._work = work
        self._base = base
        self._patterns = (ROOT / ".dockerignore").read_text().split()
        self._host = host_settings()
        self._built: dict[str, Image] = {}

    def build(self, name: str) -> Image:
        """The image of a stage, with all that it needs."""
        if name in self._built:
            return self._built[name]
        stage = self._dockerfile.stage(name)
        image = self._begin(stage)
        for instruction in stage.instructions:
            self._carry_out(image, instruction)
        self._built[name] = image
        return image

    def _begin(self, stage: Stage) -> Image:
        root = self._work / stage.name
        if stage.base in {other.name for other in self._dockerfile.stages}:
            parent = self.build(stage.base)
            copy_root(parent.root, root)
            return Image(root, dict(parent.env), parent.workdir, parent.user, list(parent.entrypoint),
                         list(parent.healthcheck), list(parent.volumes))  # fmt: skip
        copy_root(self._base, root)
        return Image(root)

    def _carry_out(self, image: Image, instruction: Instruction) -> None:
        started = time.monotonic()
        if instruction.name == "RUN":
            with mounted_system(image.root, self._host):
                code = image.run(["/bin/sh", "-c", instruction.value], self._host)
            if code:
                raise SystemExit(f"error: Dockerfile:{instruction.line}: RUN ended with {code}")
        elif instruction.name == "COPY":
            self._copy(image, instruction.words())
        else:
            note(image, instruction)
        took_s = time.monotonic() - started
        say(f"{image.root.name}: {instruction.name} {instruction.value[:70]} ({took_s:.0f} s)")

    def _copy(self, image: Image, words: Sequence[str]) -> None:
        flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        stage = flags.get("from")
        origin = self.build(stage).root if stage else ROOT
        for source in sources:
            into = inside(image.root, os.path.join(image.workdir, target))
            found = inside(origin, source)
            if found.is_dir():
                ignore = None if stage else self._ignored
                shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True, ignore=ignore)
                continue
            if not stage and is_ignored(source, self._patterns):
                raise SystemExit(f"error: .dockerignore keeps {source} from the build")
            into = into / found.name if target.endswith("/") else into
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, into)

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        relative = Path(folder).relative_to(ROOT)
        return {name for name in names if is_ignored(str(relative / name), self._patterns)}


def note(image: Image, instruction: Instruction) -> None:
    """Takes over an instruction that changes no more than how things are run."""
    match instruction.name:
        case "ENV" | "ARG":
            for word in instruction.words():
                key, _, value = word.partition("=")
                image.env[key] = expand(value, image.env)
        case "WORKDIR":
            image.workdir = instruction.value
            inside(image.root, image.workdir).mkdir(parents=True, exist_ok=True)
        case "USER":
            image.user = instruction.value
        case "VOLUME":
            image.volumes += instruction.value.split()
        case "ENTRYPOINT":
            image.entrypoint = instruction.command() or []
        case "HEALTHCHECK":
            image.healthcheck = instruction.command() or []
        case "LABEL" | "EXPOSE" | "STOPSIGNAL":
            pass
        case other:
            raise SystemExit(f"error: Dockerfile:{instruction.line}: {other} is not known to this check")


def inside(root: Path, path: str) -> Path:
    """Where `path` of a root lies."""
    return root / path.removeprefix("/")


def copy_root(source: Path, target: Path) -> None:
    """Copies a root without what is mounted in it."""
    subprocess.run(["cp", "--archive", "--one-file-system", "--reflink=auto", source, target], check=True)


@contextlib.contextmanager
def mounted_system(root: Path, host: Mapping[str, str]) -> Iterator[None]:
    """Gives a root /proc, a few devices, name resolution, and what pip uses of this machine's disk."""
    with contextlib.ExitStack() as mounts:
        mounts.enter_context(mounted(root / "proc", "-t", "proc", "proc"))
        mounts.enter_context(mounted(root / "dev", "-t", "tmpfs", "tmpfs"))
        for name in DEVICES:
            (root / "dev" / name).touch()
            mounts.enter_context(mounted(root / "dev" / name, "--bind", f"/dev/{name}"))
        (root / "dev" / "fd").symlink_to("/proc/self/fd")
        shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
        for path in local_paths(host):
            target = inside(root, str(path))
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            mounts.enter_context(mounted(target, "--bind", path))
        yield


@contextlib.contextmanager
def mounted(target: Path, *arguments: str | Path) -> Iterator[None]:
    """Something that is mounted at `target` for a while."""
    subprocess.run(["mount", *arguments, target], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--recursive", target], check=True)


def host_settings() -> dict[str, str]:
    """This machine's settings of pip and of what it goes through, as variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2].replace("-", "_").upper()
        settings[f"PIP_{option}"] = value.strip("'\"")
    return settings


def local_paths(settings: Mapping[str, str]) -> Iterator[Path]:
    """Files and folders of this machine that settings name."""
    seen = set()
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        # Of an index on the disk the folder above it holds the files.
        path = path.parent if word.startswith("file://") else path
        if path.is_absolute() and path.exists() and path not in seen:
            seen.add(path)
            yield path


def check(image: Image, work: Path) -> None:
    """Starts the server on a root that cannot be written to, and looks what it does."""
    uid, _, gid = image.user.partition(":")
    with mounted_system(image.root, {}), contextlib.ExitStack() as mounts:
        for volume in image.volumes:
            outside = work / "volumes" / volume.strip("/")
            outside.mkdir(parents=True, exist_ok=True)
            os.chown(outside, int(uid), int(gid))
            mounts.enter_context(mounted(inside(image.root, volume), "--bind", outside))
        mounts.enter_context(mounted(image.root / "tmp", "-t", "tmpfs", "-o", "mode=1777", "tmpfs"))
        # To itself, with all that is mounted in it, so that it can be made read-only without them.
        mounts.enter_context(mounted(image.root, "--rbind", image.root))
        subprocess.run(["mount", "-o", "remount,bind,ro", image.root], check=True)
        observe(image)


def observe(image: Image) -> None:
    """Starts the server, waits until it is in health, asks for a token and stops it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"HOME": "/home/streamserve", "STREAMSERVE_HOST": "127.0.0.1", "STREAMSERVE_PORT": str(port)}
    server = image.popen(image.entrypoint, settings)
    try:
        await_health(image, server, settings)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health?deep=1", timeout=PATIENCE_S) as answer:
            say(f"a token went through everything: {answer.read().decode()}")
        server.send_signal(signal.SIGTERM)
        code = server.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
    if code:
        raise SystemExit(f"error: SIGTERM ended the server with {code}")
    say("SIGTERM ended the server with 0")


def await_health(image: Image, server: subprocess.Popen[bytes], settings: Mapping[str, str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while image.run(image.healthcheck, settings):
        if server.poll() is not None:
            raise SystemExit(f"error: the server ended with {server.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit("error: the health check was never content")
        time.sleep(3)
    say("the health check is content")


def say(what: str) -> None:
    print(f"check: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu", help="stage of the Dockerfile")
    parser.add_argument("--work", type=Path, required=True, help="empty folder for the roots")
    parser.add_argument("--base", type=Path, required=True, help="root that stands for the base image")
    arguments = parser.parse_args()
    dockerfile = Dockerfile.parse((ROOT / "Dockerfile").read_text())
    image = Builder(dockerfile, arguments.work, arguments.base).build(arguments.target)
    sizes = subprocess.run(
        ["du", "-smx", arguments.base, image.root], capture_output=True, text=True, check=True
    )
    base, whole = (int(line.split()[0]) for line in sizes.stdout.splitlines())
    say(f"{whole} MiB, of them {base} MiB in the root that stands for the base image")
    check(image, arguments.work)


if __name__ == "__main__":
    main()
