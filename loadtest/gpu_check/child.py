"""A process that runs sections one after the other: `python -m loadtest.gpu_check.child`."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any, Protocol

from loadtest.gpu_check.results import Record
from loadtest.gpu_check.setting import Setting, on_gpu, rehearsal


class SectionModule(Protocol):
    """A module of `sections`."""

    def run(self, setting: Setting, record: Record, shared: dict[str, Any]) -> None:
        """Looks at one thing.

        Args:
            setting: how large things are.
            record: takes down what is found.
            shared: what earlier sections of this process have made and later ones may use.
        """


def run_section(name: str, setting: Setting, shared: dict[str, Any]) -> None:
    """Runs a section; whatever it raises is a finding."""
    record = Record(name, setting.folder, judges=not setting.is_rehearsal)
    try:
        module: Any = importlib.import_module(f"loadtest.gpu_check.sections.{name}")
        section: SectionModule = module
        section.run(setting, record, shared)
    except Exception:
        record.end(traceback.format_exc())
    else:
        record.end()


def main(arguments: list[str]) -> int:
    """Runs the sections that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("sections", nargs="+")
    options = parser.parse_args(arguments)
    setting = rehearsal(options.out) if options.rehearse else on_gpu(options.out)
    shared: dict[str, Any] = {}
    for name in options.sections:
        run_section(name, setting, shared)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
