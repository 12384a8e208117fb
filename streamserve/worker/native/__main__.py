"""Compiles the kernels beside their sources, for an image: `python -m streamserve.worker.native`.

On x86-64 for every level of processors that there is a difference for, since the image may run on any.
"""

from __future__ import annotations

import platform

from streamserve.worker.native.build import build, targets_of
from streamserve.worker.native.operators import BUILT_FOLDER, recipe_for


def main() -> None:
    """Prints what was made."""
    for target in targets_of(platform.machine()):
        print(build(recipe_for(target), BUILT_FOLDER))


if __name__ == "__main__":
    main()
