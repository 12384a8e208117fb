"""What the operator calls MODEL → a local folder, a name and a number format."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamserve.artifacts.aliases import ALIASES, DEFAULT_ALIAS
from streamserve.artifacts.cache import ModelCache
from streamserve.artifacts.gguf_header import read_architecture
from streamserve.artifacts.hub import fetch_from_hub, is_hub_id
from streamserve.bootstrap import ResolvedModel
from streamserve.config import ModelConfig, cache_root
from streamserve.errors import ConfigError
from streamserve.worker.models.config import read_decoder_config

Progress = Callable[[str, float], None]

_GGUF_SUFFIX = ".gguf"
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class _Source:
    """What MODEL is on this machine.

    Attributes:
        path: the folder or GGUF file.
        name: the model's own.
        sampling: of `PackagedModel`.
    """

    path: Path
    name: str
    sampling: Mapping[str, float] = field(default_factory=dict)


def resolve_model(
    config: ModelConfig, progress: Progress, environ: Mapping[str, str] | None = None
) -> ResolvedModel:
    """Finds, downloads or converts the model, whichever it takes.

    Args:
        config: the operator's words.
        progress: told what is going on and how far it is, from 0 to 1.
        environ: where the cache folder is looked up; the process's own by default.

    Raises:
        ConfigError: there is no such model or it cannot be served; says what would help, in one line.
    """
    dtype = config.dtype if config.dtype != "auto" else native_dtype(config.device)
    source = _locate(config, progress)
    if source.path.is_file():
        cache = ModelCache(cache_root(environ))
        if config.load_format == "safetensors":
            raise ConfigError(f"--load-format safetensors: {source.path} is a file; give a folder.")
        path = _converted(source, dtype, cache, progress)
    else:
        path = source.path
        _check_folder(path, config)
    load_format = "dummy" if config.load_format == "dummy" else "safetensors"
    return ResolvedModel(path, config.served_model_name or source.name, dtype, load_format)


def native_dtype(device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """bfloat16 where `device` computes in it, else float32: emulated bfloat16 is slower than float32."""
    if device == "cuda":
        return "bfloat16"
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "float32"
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    words = flags[1].split() if flags else []
    return "float32" if _BFLOAT16_FLAGS.isdisjoint(words) else "bfloat16"


def _locate(config: ModelConfig, progress: Progress) -> _Source:
    model = config.model if config.model is not None else DEFAULT_ALIAS
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser, never raises
    if os.path.exists(path):  # unlike Path.exists, False where looking is not permitted
        path = path.resolve()
        is_gguf = path.is_file() and path.suffix.lower() == _GGUF_SUFFIX
        return _Source(path, path.stem if is_gguf else path.name)
    if packaged := ALIASES.get(model.lower()):
        return _Source(packaged.locate(), packaged.name, packaged.sampling)
    if is_hub_id(model) and not model.lower().endswith(_GGUF_SUFFIX):
        folder = fetch_from_hub(model, config.load_format != "dummy", progress)
        return _Source(folder, model.partition("/")[2])
    if os.sep in model or path.suffix.lower() == _GGUF_SUFFIX:
        raise ConfigError(f"MODEL {model}: no such file or folder.")
    raise ConfigError(
        f"MODEL {model}: neither a path nor a known name; give a folder, a GGUF file, a hub id "
        f"(organisation/name) or one of: {', '.join(ALIASES)}."
    )


def _converted(source: _Source, dtype: str, cache: ModelCache, progress: Progress) -> Path:
    """The folder that the GGUF file `source` was or is now converted to."""
    # Here, so that a model that needs no conversion does not wait for numpy.
    from streamserve.artifacts.gguf_convert import ARCHITECTURES, CONVERTER_VERSION, convert_gguf

    file = source.path
    status = file.stat()
    identity = f"{CONVERTER_VERSION}\0{file}\0{status.st_size}\0{status.st_mtime_ns}"
    if source.sampling:
        identity += f"\0{json.dumps(source.sampling, sort_keys=True)}"
    fingerprint = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    entry = f"{re.sub(r'[^A-Za-z0-9._-]', '_', source.name)}-{fingerprint}-{dtype}"
    if found := cache.find(entry):
        return found
    architecture = read_architecture(file)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"MODEL {file}: the architecture {architecture} is not supported "
            f"(known: {', '.join(ARCHITECTURES)}); name another model."
        )
    return cache.add(
        entry,
        make=lambda folder: convert_gguf(file, folder, dtype, progress, source.sampling),
        waiting=lambda: progress(f"waiting for another process that converts {file.name}", 0.0),
    )


def _check_folder(folder: Path, config: ModelConfig) -> None:
    """Refuses at once what the other processes would only refuse after they have started."""
    if config.load_format == "gguf":
        raise ConfigError(f"--load-format gguf: {folder} is a folder; give the GGUF file itself.")
    if not (folder / "config.json").is_file():
        hint = "give the .gguf file in it" if any(folder.glob("*.gguf")) else "give a Hugging Face folder"
        raise ConfigError(f"MODEL {folder}: the folder has no config.json; {hint}.")
    read_decoder_config(folder)
    if config.load_format == "dummy":
        return
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"MODEL {folder}: the folder has no tokenizer.json; save the tokenizer as a fast one."
        )
    if not any((folder / name).is_file() for name in _WEIGHT_FILES):
        raise ConfigError(
            f"MODEL {folder}: the folder has no safetensors weights ({' or '.join(_WEIGHT_FILES)}); "
            "convert them, or use --load-format dummy."
        )
