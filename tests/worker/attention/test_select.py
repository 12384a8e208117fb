"""Which backend is chosen, and what an operator is told when theirs cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamserve.errors import ConfigError
from streamserve.worker.attention.select import AttentionFacts, choose_attention_backend

NATIVE = AttentionFacts("cpu", (0, 0), "float32", 128, 16, frozenset({"triton"}))
CPU = replace(NATIVE, native_obstacle="finds no C++ compiler, apt-get install g++ or set CXX")
HOPPER = AttentionFacts("cuda", (9, 0), "bfloat16", 128, 64, frozenset({"triton"}))
FLASH_2 = replace(HOPPER, packages=HOPPER.packages | {"flash_attn"}, block_size=256)
FLASH_3 = replace(HOPPER, packages=FLASH_2.packages | {"flash_attn_interface"})


@pytest.mark.parametrize(
    ("name", "facts", "label"),
    [
        ("auto", NATIVE, "native CPU"),
        ("auto", replace(NATIVE, dtype="bfloat16", block_size=5, head_dim=512), "native CPU"),
        ("auto", replace(NATIVE, dtype="float16"), "torch"),
        ("cpu", NATIVE, "native CPU"),
        ("torch", NATIVE, "torch"),
        ("auto", CPU, "torch"),
        ("auto", replace(CPU, interprets_triton=True), "torch"),
        ("auto", HOPPER, "Triton"),
        ("auto", replace(HOPPER, dtype="float32"), "Triton"),
        ("auto", FLASH_2, "Triton"),
        ("auto", FLASH_3, "FlashAttention-3"),
        ("auto", replace(FLASH_3, capability=(10, 0)), "Triton"),
        ("auto", replace(FLASH_3, dtype="float32"), "Triton"),
        ("auto", replace(HOPPER, packages=frozenset()), "torch"),
        ("auto", replace(HOPPER, capability=(7, 5)), "torch"),
        ("auto", replace(HOPPER, block_size=5), "torch"),
        ("auto", replace(FLASH_3, launcher_obstacle="finds no C compiler"), "torch"),
        ("auto", replace(HOPPER, head_dim=512), "torch"),
        ("torch", FLASH_3, "torch"),
        ("torch", replace(CPU, packages=frozenset()), "torch"),
        ("triton", FLASH_3, "Triton"),
        ("triton", replace(CPU, interprets_triton=True), "Triton"),
        ("flash_attn", FLASH_2, "FlashAttention-2"),
        ("flash_attn", FLASH_3, "FlashAttention-3"),
        ("flash_attn", replace(FLASH_3, block_size=5), "FlashAttention-3"),
        ("flash_attn", replace(FLASH_3, block_size=256, capability=(8, 0)), "FlashAttention-2"),
    ],
)
def test_takes_the_first_that_works(name: str, facts: AttentionFacts, label: str) -> None:
    choice = choose_attention_backend(name, facts)
    assert choice.label == label
    assert choice.reason.startswith(f"attention backend: {label}")
    assert "\n" not in choice.reason


@pytest.mark.parametrize(
    ("name", "facts", "parts"),
    [
        ("cpu", CPU, ["native CPU: finds no C++ compiler, apt-get install g++"]),
        ("cpu", HOPPER, ["native CPU: needs the model on a CPU", "--device cpu"]),
        ("cpu", replace(NATIVE, dtype="float16"), ["does not compute in float16", "--dtype bfloat16"]),
        ("triton", CPU, ["Triton: needs a CUDA device", "--attention-backend torch"]),
        ("triton", replace(HOPPER, packages=frozenset()), ["package triton", "streamserve[gpu]"]),
        ("triton", replace(HOPPER, capability=(7, 5)), ["compute capability 8.0 and this is 7.5"]),
        ("triton", replace(HOPPER, launcher_obstacle="finds no C compiler"), ["Triton: finds no C compiler"]),
        ("triton", replace(HOPPER, block_size=40), ["blocks of 40 tokens", "--block-size 16"]),
        ("triton", replace(HOPPER, head_dim=512), ["head dimension of 512", "--attention-backend torch"]),
        ("flash_attn", CPU, ["FlashAttention-3 and FlashAttention-2: needs a CUDA device"]),
        ("flash_attn", HOPPER, ["package flash_attn_interface", "streamserve[flash]"]),
        ("flash_attn", replace(FLASH_2, block_size=16), ["blocks of 16 tokens", "--block-size 256"]),
        ("flash_attn", replace(FLASH_2, dtype="float32"), ["FlashAttention-2: does not", "--dtype bfloat16"]),
        ("flash_attn", replace(FLASH_2, head_dim=100), ["head dimension of 100"]),
        ("flash_attn", replace(FLASH_2, head_dim=512), ["head dimension of 512"]),
        ("flash_attn", replace(FLASH_2, capability=(7, 5)), ["this is 7.5", "--attention-backend torch"]),
        (
            "flash_attn",
            replace(FLASH_3, packages=frozenset({"flash_attn"}), block_size=256),
            ["to fill the cache"],
        ),
    ],
)
def test_says_what_would_help(name: str, facts: AttentionFacts, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^--attention-backend {name}: ") as caught:
        choose_attention_backend(name, facts)
    for part in parts:
        assert part in str(caught.value)


def test_the_reason_names_what_was_in_the_way() -> None:
    reason = choose_attention_backend("auto", HOPPER).reason
    assert "FlashAttention-3: needs the package flash_attn_interface" in reason
    reason = choose_attention_backend("auto", CPU).reason
    assert "FlashAttention-3 and Triton: needs a CUDA device" in reason
    assert "native CPU: finds no C++ compiler, apt-get install g++" in reason
