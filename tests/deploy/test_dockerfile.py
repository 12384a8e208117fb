"""The rules that the Dockerfile keeps, and the small reader that they and check_dockerfile.sh rest on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dockerfile import Dockerfile, Instruction, expand, is_ignored

from streamserve.supervisor.watch import STOP_SIGNALS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
FILE = Dockerfile.parse(TEXT)
IGNORE = (ROOT / ".dockerignore").read_text().split()
TARGETS = ("cpu", "cuda")
UID = "10001"
# Name, whole version, and the release of Debian; a digest may follow.
PINNED = re.compile(r"[a-z/]+:\d+\.\d+\.\d+-[a-z-]+(@sha256:[0-9a-f]{64})?")


def instructions(target: str, name: str) -> list[Instruction]:
    """Those of one name that an image is made of, in order."""
    return [instruction for stage in FILE.lineage(target) for instruction in stage.of(name)]


def environment(target: str) -> dict[str, str]:
    words = [word for instruction in instructions(target, "ENV") for word in instruction.words()]
    return dict(word.split("=", 1) for word in words)


def test_the_target_without_a_gpu_is_built_by_default() -> None:
    assert FILE.stages[-1].name == "cpu"
    assert FILE.stage("cuda")


def test_bases_are_pinned() -> None:
    names = {stage.name for stage in FILE.stages}
    bases = {stage.base for stage in FILE.stages} - names
    assert bases
    for base in bases:
        assert PINNED.fullmatch(base), base


@pytest.mark.parametrize("target", TARGETS)
def test_the_user_is_a_fixed_number_and_not_root(target: str) -> None:
    # A number: Kubernetes cannot tell whether a name is root.
    assert [user.value for user in instructions(target, "USER")] == [f"{UID}:{UID}"]
    assert FILE.stage(target).instructions[-1].name == "USER"
    (creation,) = [run.value for run in instructions(target, "RUN") if "useradd" in run.value]
    assert f"--uid {UID}" in creation
    assert f"--gid {UID}" in creation


@pytest.mark.parametrize("target", TARGETS)
def test_signals_reach_the_server(target: str) -> None:
    (entry,) = instructions(target, "ENTRYPOINT")
    command = entry.command()
    assert command is not None, "the shell form puts a shell in front of it"
    assert command[-3:] == ["-m", "streamserve", "serve"]
    (signal,) = instructions(target, "STOPSIGNAL")
    assert signal.value in {number.name for number in STOP_SIGNALS}


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_runs_what_is_in_the_image(target: str) -> None:
    (check,) = instructions(target, "HEALTHCHECK")
    command = check.command()
    assert command is not None
    (entry,) = instructions(target, "ENTRYPOINT")
    assert command[0] == (entry.command() or [""])[0]
    copied = [copy.words()[0] for copy in instructions(target, "COPY")]
    assert any(source.endswith(command[1].removeprefix("/app/")) for source in copied)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_goes_to_the_volume(target: str) -> None:
    (volume,) = instructions(target, "VOLUME")
    written = environment(target)
    for name in ("STREAMSERVE_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert written[name].startswith(volume.value), name


def test_dependencies_come_by_way_of_the_lock() -> None:
    """setup_env.py installs under requirements/lock.txt; nothing else may install packages of Python."""
    runs = [run for stage in FILE.stages for run in stage.of("RUN")]
    assert not [run for run in runs if re.search(r"\bpip3? install\b", run.value)]
    for name in ("build-cpu", "build-cuda"):
        assert "scripts/setup_env.sh serve" in FILE.stage(name).of("RUN")[0].value


def test_a_compiler_is_in_the_cuda_image_alone() -> None:
    assert not [run for run in instructions("cpu", "RUN") if "apt-get" in run.value]
    assert [run for run in instructions("cuda", "RUN") if "g++" in run.value]


def test_packages_of_debian_leave_nothing_behind() -> None:
    for stage in FILE.stages:
        for run in stage.of("RUN"):
            if "apt-get install" in run.value:
                assert "--no-install-recommends" in run.value
                assert "rm -rf /var/lib/apt/lists" in run.value


def test_everything_copied_is_there_and_reaches_the_build() -> None:
    copies = [copy.words() for stage in FILE.stages for copy in stage.of("COPY")]
    sources = [source for words in copies if "--from" not in words[0] for source in words[:-1]]
    assert len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source, IGNORE), source
    stages = {stage.name for stage in FILE.stages}
    assert {words[0].removeprefix("--from=") for words in copies if "--from" in words[0]} <= stages


def test_nothing_else_reaches_the_build() -> None:
    for path in (".git/config", "tests/server.py", ".venv/bin/python", "streamserve/__pycache__/cli.pyc",
                 "docs/api.md", "deploy/prometheus/alerts.yml"):  # fmt: skip
        assert is_ignored(path, IGNORE), path


SMALL = """\
# A comment.
ARG BASE=debian:12.1.0-slim
FROM ${BASE} AS one
RUN first \\
    # a comment between
    && second
FROM one AS two
HEALTHCHECK --interval=1s CMD ["check", "a b"]
ENTRYPOINT run it
"""


def test_a_dockerfile_is_read() -> None:
    small = Dockerfile.parse(SMALL)
    assert [(stage.base, stage.name) for stage in small.stages] == [
        ("debian:12.1.0-slim", "one"),
        ("one", "two"),
    ]
    assert small.stage("one").instructions == (Instruction(4, "RUN", "first && second"),)
    assert [stage.name for stage in small.lineage("two")] == ["one", "two"]
    health, entry = small.stage("two").instructions
    assert health.command() == ["check", "a b"]
    assert entry.command() is None


@pytest.mark.parametrize(
    ("text", "expected"), [("$A/x", "1/x"), ("${A}x", "1x"), ("$AB", ""), ("a${B}b", "ab")]
)
def test_variables_are_put_in(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


@pytest.mark.parametrize(
    ("path", "patterns", "expected"),
    [
        ("a", ["*"], True),
        ("a/b", ["*"], True),
        ("a/b", ["*", "!a"], False),
        ("a/b/c", ["*", "!a/b"], False),
        ("a/c", ["*", "!a/b"], True),
        ("a/b/x.pyc", ["**/*.pyc"], True),
        ("a/b", ["b"], False),
    ],
)
def test_the_ignore_file_is_read_as_docker_does(path: str, patterns: list[str], expected: bool) -> None:
    assert is_ignored(path, patterns) is expected
