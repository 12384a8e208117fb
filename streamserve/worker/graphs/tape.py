"""TapeGraph: what a CUDA graph does, on a CPU.

Capture writes down every operation with the tensors that it got, that is: with the memory that it worked on,
and with all host numbers. Replay goes through the tape, not through the Python. What the operations allocated
is the pool, and whatever is in there is poisoned as soon as a replay ends, as other graphs of the pool would
overwrite it. So a number baked in, a buffer that has moved, padding that writes or a tensor that is expected
to survive come out as wrong tokens here as they would on a GPU, and asking the device for a number is an
error in both.

What does not pass through torch's dispatcher is not on the tape: kernels of others must be registered as
operators. Reading a tensor's memory through NumPy is seen; reading it through its address is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamserve.worker.graphs.graph import Graph, GraphDevice, GraphError

# Each of them waits for the device, has a shape that depends on what is in a tensor, or brings numbers from
# the host along (lift_fresh: torch.tensor; resolve_conj: tolist and numpy).
_FORBIDDEN = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "item",
        "lift_fresh",
        "masked_select",
        "nonzero",
        "resolve_conj",
        "unique_consecutive",
        "unique_dim",
    )
)
# Floats of all widths that are no number; integers larger than any index.
_NAN_BYTE, _BAD_INDEX_BYTE = 0xFF, 0x7F


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation with the tensors that it read and those that it returned."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[torch.Tensor]

    def run(self) -> None:
        """Runs it again and puts what it returns where the first run put it."""
        again = _tensors(self.function(*self.args, **self.kwargs))
        for output, new in zip(self.outputs, again, strict=True):
            # A view, or an output that was handed in, is there already.
            if output.data_ptr() != new.data_ptr():
                output.copy_(new)


class _Tape(TorchDispatchMode):  # type: ignore[misc]
    """Writes down all that is dispatched.

    Attributes:
        calls: in their order.
        pool: the memory that they allocated, with what to poison it with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.pool: list[tuple[torch.UntypedStorage, int]] = []
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: skipping would import the compiler, which takes longer than all the rest."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.name().split(".")[0] in _FORBIDDEN:
            raise GraphError(
                f"{func.name()} in a captured forward: it needs the host, which is not there in a replay"
            )
        kwargs = kwargs or {}
        self._known.update(_memory(tensor) for tensor in _tensors((args, kwargs)))
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        for tensor in outputs:
            if tensor.numel() and _memory(tensor) not in self._known:
                self._known.add(_memory(tensor))
                poison = _NAN_BYTE if tensor.is_floating_point() else _BAD_INDEX_BYTE
                self.pool.append((tensor.untyped_storage(), poison))
        self.calls.append(_Call(func, args, kwargs, outputs))
        return result


class TapeGraph(Graph):
    """See the module. The operations also run while they are captured."""

    def __init__(self) -> None:
        self._tape = _Tape()

    def begin(self) -> None:
        """See `Graph.begin`."""
        self._tape.__enter__()

    def end(self) -> None:
        """See `Graph.end`."""
        self._tape.__exit__(None, None, None)
        self._poison()

    def replay(self) -> None:
        """See `Graph.replay`."""
        for call in self._tape.calls:
            call.run()
        self._poison()

    def _poison(self) -> None:
        for memory, byte in self._tape.pool:
            memory.fill_(byte)


class TapeGraphs(GraphDevice):
    """Makes `TapeGraph`s. Each has a pool of its own, since poison stands in for the others."""

    def new_graph(self) -> TapeGraph:
        """See `GraphDevice.new_graph`."""
        return TapeGraph()

    def capturing(self) -> AbstractContextManager[None]:
        """See `GraphDevice.capturing`."""
        return nullcontext()

    def synchronize(self) -> None:
        """A CPU has always done what it was asked for."""

    def free_bytes(self) -> int:
        """A tape takes what it takes, from wherever it is: nothing to account for."""
        return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Which piece of memory a tensor is on."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
