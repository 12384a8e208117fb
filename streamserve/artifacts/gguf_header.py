"""The first few bytes of a GGUF file: enough to refuse a wrong one at once, without reading its tables.

File: magic `GGUF`, u32 version, u64 number of tensors, u64 number of keys, then for each key its name, a u32
type and the value. Strings are a u64 length and UTF-8; arrays a u32 type, a u64 length and the values.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from streamserve.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# u8 i8 u16 i16 u32 i32 f32 bool, u64 i64 f64
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_LONGEST_NAME = 65535


def read_architecture(path: Path) -> str:
    """The model architecture that a GGUF file names, e.g. `llama`.

    Raises:
        ConfigError: the file cannot be read, is no GGUF file of a known version, or names none.
    """
    try:
        with path.open("rb") as file:
            return _read_architecture(file)
    except OSError as error:
        raise ConfigError(f"MODEL {path}: cannot be read ({error.strerror}).") from error
    except RecursionError as error:
        raise ConfigError(f"MODEL {path}: the GGUF file is damaged ({error}).") from error
    except (struct.error, ValueError) as error:
        raise ConfigError(f"MODEL {path}: {error}; give a GGUF file or a Hugging Face folder.") from error


def _read_architecture(file: BinaryIO) -> str:
    if file.read(4) != _MAGIC:
        raise ValueError("not a GGUF file")
    version, _, num_keys = struct.unpack("<IQQ", _read(file, 20))
    if version not in _VERSIONS:
        raise ValueError(f"GGUF version {version} is not supported")
    for _ in range(num_keys):
        name = _read_string(file)
        kind = _read_u32(file)
        if name == "general.architecture" and kind == _STRING:
            return _read_string(file)
        _skip(file, kind)
    raise ValueError("the GGUF file names no architecture")


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("the GGUF file is cut short")
    return data


def _read_u32(file: BinaryIO) -> int:
    value: int = struct.unpack("<I", _read(file, 4))[0]
    return value


def _read_u64(file: BinaryIO) -> int:
    value: int = struct.unpack("<Q", _read(file, 8))[0]
    return value


def _read_string(file: BinaryIO) -> str:
    length = _read_u64(file)
    if length > _LONGEST_NAME:
        raise ValueError("the GGUF file is damaged")
    return _read(file, length).decode()


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_read_u64(file), 1)
    elif kind == _ARRAY:
        item = _read_u32(file)
        count = _read_u64(file)
        if item in _SCALAR_BYTES:
            file.seek(count * _SCALAR_BYTES[item], 1)
        else:
            for _ in range(count):
                _skip(file, item)
    elif kind in _SCALAR_BYTES:
        file.seek(_SCALAR_BYTES[kind], 1)
    else:
        raise ValueError("the GGUF file is damaged")
