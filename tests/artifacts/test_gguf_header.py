from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.artifacts.gguf_header import read_architecture
from streamserve.errors import ConfigError


def header(num_keys: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, num_keys) + body


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_reads_what_a_writer_wrote(gguf_file: Callable[..., Path]) -> None:
    assert read_architecture(gguf_file(architecture="qwen3")) == "qwen3"


def test_skips_every_kind_of_value_in_front(tmp_path: Path) -> None:
    scalars = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    body = b"".join(string(f"k{kind}") + struct.pack("<I", kind) + bytes(n) for kind, n in scalars.items())
    body += string("text") + struct.pack("<I", 8) + string("value")
    body += string("numbers") + struct.pack("<IIQ", 9, 4, 3) + bytes(12)
    body += string("words") + struct.pack("<IIQ", 9, 8, 2) + string("one") + string("two")
    body += string("general.architecture") + struct.pack("<I", 8) + string("llama")
    path = tmp_path / "m.gguf"
    path.write_bytes(header(len(scalars) + 4, body))
    assert read_architecture(path) == "llama"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF\x03\x00", "cut short"),
        (header(0, version=1), "version 1"),
        (header(0), "names no architecture"),
        (header(1, string("general.architecture")), "cut short"),
        (header(1, struct.pack("<Q", 2**60)), "damaged"),
        (header(1, string("key") + struct.pack("<I", 99)), "damaged"),
        (header(1, struct.pack("<Q", 2) + b"\xff\xfe"), "decode"),
        (header(2, string("key") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000), "damaged"),
    ],
)
def test_refuses_other_files_in_one_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_architecture(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
