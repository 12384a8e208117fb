"""The client packages as they are handed out: built, installed where there is nothing else, and run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from server import ROOT, wait_idle

pytestmark = pytest.mark.clients
CLIENTS = ROOT / "clients"
ADDRESS = "http://127.0.0.1:8000"


def run(*command, cwd=None):
    """What a command prints; it must succeed, and know nothing of this checkout."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def examples(client, language, server):
    """The programs in a README, for this server."""
    page = (CLIENTS / client / "README.md").read_text(encoding="utf-8")
    programs = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert programs
    assert len(programs[0].replace("\n\n", "\n").splitlines()) <= 10
    return [program.replace(ADDRESS, server.url) for program in programs]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A folder with the Python package as wheel and source."""
    pytest.importorskip("build", reason="build is not installed")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", CLIENTS / "python", "--outdir", folder)
    return folder


def test_python_package(distributions, tmp_path, tiny_server):
    (wheel,) = distributions.glob("*.whl")
    (source,) = distributions.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"streamserve_client/__init__.py", "streamserve_client/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(source) as archive:
        assert any(name.endswith("/README.md") for name in archive.getnames())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", wheel)
    installed = run(python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    names = {package["name"] for package in json.loads(installed)}
    assert {"httpx", "httpx-sse", "websockets", "streamserve-client"} <= names
    assert "streamserve" not in names
    for program in examples("python", "python", tiny_server):
        assert run(python, "-W", "error", "-c", program, cwd=tmp_path).strip()
    wait_idle(tiny_server)


def test_javascript_package(tmp_path, tiny_server):
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    run(npm, "pack", "--pack-destination", tmp_path, cwd=CLIENTS / "javascript")
    (tarball,) = tmp_path.glob("*.tgz")
    with tarfile.open(tarball) as archive:
        names = {name.removeprefix("package/") for name in archive.getnames()}
    assert {"package.json", "README.md", "LICENSE", "src/index.js", "types/index.d.ts"} <= names
    assert not any(name.startswith("test") for name in names)
    project = tmp_path / "project"
    project.mkdir()
    run(npm, "init", "--yes", cwd=project)
    run(npm, "install", "--no-audit", "--no-fund", tarball, cwd=project)
    assert [path.name for path in (project / "node_modules").iterdir() if path.name[0] != "."] == [
        "streamserve-client"
    ]
    for program in examples("javascript", "js", tiny_server):
        (project / "example.mjs").write_text(program, encoding="utf-8")
        assert run("node", "example.mjs", cwd=project).strip()
    wait_idle(tiny_server)
