"""Compiles Triton kernels for a GPU that need not be there: JSON on stdin, JSON on stdout.

A job has `module`, `kernel`, `capability`, `signature` (argument → type, `constexpr` among them),
`constants`, `divisible` (arguments that are multiples of 16) and `options`; its result `kernel`, `shared`
(bytes of shared memory) and `uses_tensor_cores`.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_one(job: dict[str, Any]) -> dict[str, Any]:
    kernel = getattr(importlib.import_module(job["module"]), job["kernel"])
    names = list(job["signature"])
    source = ASTSource(
        kernel,
        signature=job["signature"],
        constexprs=job["constants"],
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", job["capability"], 32), options=job["options"])
    assert compiled.asm["cubin"]
    ptx = compiled.asm["ptx"]
    return {
        "kernel": job["kernel"],
        "shared": compiled.metadata.shared,
        "uses_tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
    }


if __name__ == "__main__":
    json.dump([compile_one(job) for job in json.load(sys.stdin)], sys.stdout)
