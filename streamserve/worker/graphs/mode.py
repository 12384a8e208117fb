"""Which steps run from captured graphs, as asked for and as the attention backend allows. Torch-free."""

from __future__ import annotations

from enum import Enum, IntEnum


class GraphSupport(IntEnum):
    """Which steps an attention backend can run inside a captured graph; each level includes those below."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class RuntimeMode(IntEnum):
    """How the forward of one step runs.

    NONE is eager. PIECEWISE replays everything but attention, which runs eagerly in between. FULL replays
    everything.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class CUDAGraphMode(Enum):
    """What is asked for: a runtime mode for steps in which every request decodes, and one for all others."""

    NONE = (RuntimeMode.NONE, RuntimeMode.NONE)
    PIECEWISE = (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE)
    FULL = (RuntimeMode.FULL, RuntimeMode.FULL)
    FULL_DECODE_ONLY = (RuntimeMode.FULL, RuntimeMode.NONE)
    FULL_AND_PIECEWISE = (RuntimeMode.FULL, RuntimeMode.PIECEWISE)

    @property
    def decode(self) -> RuntimeMode:
        """For uniform steps: every request runs the same few tokens, one unless it speculates."""
        return self.value[0]

    @property
    def mixed(self) -> RuntimeMode:
        """For all other steps: prefill, or prefill and decode together."""
        return self.value[1]


def lower(mode: CUDAGraphMode, support: GraphSupport, query_len: int = 1) -> CUDAGraphMode:
    """The best that can be had of `mode`.

    Where the backend cannot be inside a graph, its place is between graphs: FULL becomes PIECEWISE, for the
    kind of steps that it cannot do, or for all when it cannot even do decodes.

    Args:
        mode: as asked for.
        support: of the attention backend; of several, the least.
        query_len: tokens that a decoding request runs in a step.
    """
    if mode is CUDAGraphMode.FULL and support < GraphSupport.ALWAYS:
        mode = CUDAGraphMode.FULL_AND_PIECEWISE
    needed = GraphSupport.UNIFORM_SINGLE_TOKEN if query_len == 1 else GraphSupport.UNIFORM_BATCH
    if mode.decode is RuntimeMode.FULL and support < needed:
        return CUDAGraphMode.PIECEWISE
    return mode
