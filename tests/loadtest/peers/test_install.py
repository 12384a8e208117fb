"""Which servers are installed, without installing any."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from loadtest.peers import install as installing


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of what is installed, in order, by an installer that fails for `bad`."""
    names: list[str] = []

    def fake(folder: Path) -> None:
        assert not folder.exists()
        folder.mkdir()
        if folder.name == "bad":
            raise subprocess.CalledProcessError(1, ["pip"])
        names.append(folder.name)

    monkeypatch.setattr(installing, "INSTALLERS", {"good": fake, "bad": fake, "other": fake})
    monkeypatch.setattr(installing, "peers_root", lambda: tmp_path)
    return names


def test_all_are_installed_once(installed: list[str]) -> None:
    assert installing.main(["good", "other"]) == 0
    assert installing.main(["good"]) == 0
    assert installed == ["good", "other"]


def test_one_that_fails_does_not_stop_the_others_and_is_tried_again(
    installed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installing.main([]) == 1
    assert installed == ["good", "other"]
    assert (tmp_path / "bad").exists()
    assert installing.main(["bad"]) == 1
    assert capsys.readouterr().err.count("bad: failed") == 2


def test_an_unknown_name_installs_nothing(installed: list[str]) -> None:
    assert installing.main(["good", "nothing"]) == 2
    assert installed == []
