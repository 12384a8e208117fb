"""Models whose forwards run compiled code between their attentions.

Attention itself is called as it is without compilation, since it works on a different cache and with other
shapes in each layer and step. What lies between two attentions is the same work in every layer: the residual
stream, the norms, the rotary embedding and the activation become few kernels around the matrix products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.passes.split_module import split_module

from streamserve.worker.attention.base import Attention
from streamserve.worker.inductor import CompiledGraph, Inductor
from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.models.llama import ForwardBuffers, LlamaLayer, LlamaModel

# Inductor chooses loops and threads for as many tokens; the code runs any number of them.
_TYPICAL_TOKENS = 64
_QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CompiledModel(ABC):
    """Stands in for a model; see `models.model.Model`.

    The residual stream and all else that outlives an attention is in buffers at fixed addresses, which the
    compiled code writes in place: in those that it is given, else in its own. So what is compiled is the same
    for forwards in graphs and outside.

    Args:
        model: parameters loaded.
        max_tokens: most tokens of a forward.
    """

    def __init__(self, model: LlamaModel, max_tokens: int) -> None:
        self._model = model
        embedding = model.embedding
        # With one row there would be nothing to tell a number of tokens from.
        rows = max(2, max_tokens)
        self._buffers = ForwardBuffers.allocate(model.config, rows, embedding.dtype, embedding.device)

    @property
    def config(self) -> DecoderConfig:
        """The model's."""
        return self._model.config

    @property
    def embedding(self) -> torch.Tensor:
        """The model's."""
        return self._model.embedding

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers | None = None,
    ) -> torch.Tensor:
        """See `LlamaModel.forward`; overwritten by the next one. Hot: once a step."""
        if buffers is None:
            buffers = self._buffers.rows(token_ids.shape[0])
        self._run(token_ids, positions, attention, metadata, buffers)
        return buffers.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LlamaModel.logits`."""
        return self._model.logits(hidden)

    def warm_up(self) -> None:
        """Runs all that there is to compile, as every later forward will: attention is left out."""
        largest = self._buffers.hidden.shape[0]
        # One token is in it because torch likes to make an exception of it, which should show here.
        for count in (min(_TYPICAL_TOKENS, largest), 1):
            token_ids = torch.zeros(count, dtype=torch.int32, device=self.embedding.device)
            positions = torch.arange(count, dtype=torch.int64, device=self.embedding.device)
            rows = self._buffers.rows(count)
            if count > 1:
                per_token = (rows.hidden, rows.cos, rows.signed_sin, rows.attended)
                for tensor in (token_ids, positions, *per_token):
                    torch._dynamo.mark_dynamic(tensor, 0)
            with torch.inference_mode():
                self.forward(token_ids, positions, _NoAttention(), None, rows)

    @abstractmethod
    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers,
    ) -> None:
        """Leaves the result in `buffers.hidden`."""


class PiecewiseModel(CompiledModel):
    """Each piece is compiled by itself, once for all layers: their weights are arguments.

    The pieces are what comes before the first attention, what lies between two, and what follows the last.

    Args:
        model, max_tokens: see `CompiledModel`.
        inductor: compiles.
    """

    def __init__(self, model: LlamaModel, max_tokens: int, inductor: Inductor) -> None:
        super().__init__(model, max_tokens)

        def compiled(piece: Callable[..., Any], name: str) -> Callable[..., Any]:
            made: Callable[..., Any] = torch.compile(
                piece, backend=inductor.backend(name), fullgraph=True, dynamic=False
            )
            return made

        self._first = compiled(_first, "before the first attention")
        self._middle = compiled(_middle, "between two attentions")
        self._last = compiled(_last, "after the last attention")

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers,
    ) -> None:
        """Hot: once a step, its loop once a layer."""
        model, layers, attended = self._model, self._model.layers, buffers.attended
        q, k, v = self._first(model, layers[0], token_ids, positions, buffers)
        for index in range(len(layers) - 1):
            attention.forward(q, k, v, attended, layer=index, metadata=metadata)
            q, k, v = self._middle(layers[index], layers[index + 1], buffers)
        attention.forward(q, k, v, attended, layer=len(layers) - 1, metadata=metadata)
        self._last(model, layers[-1], buffers)


class WholeModel(CompiledModel):
    """The forward is traced as a whole; its graph is split at the attentions and the parts are compiled.

    It comes to the same pieces by another way, for comparison. Guards on every layer's weights are checked
    each step.

    Args:
        model, max_tokens: see `CompiledModel`.
        inductor: compiles.
    """

    def __init__(self, model: LlamaModel, max_tokens: int, inductor: Inductor) -> None:
        super().__init__(model, max_tokens)
        self._inductor = inductor
        self._compiled = torch.compile(_whole, backend=self._split, fullgraph=True, dynamic=False)
        # Of the forward that is going on.
        self._attention: Attention = _NoAttention()
        self._metadata: Any = None

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers,
    ) -> None:
        self._attention, self._metadata = attention, metadata
        self._compiled(self._model, token_ids, positions, buffers)
        self._attention, self._metadata = _NoAttention(), None

    def _split(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        """A backend of torch.compile: attention runs between compiled parts.

        Raises:
            RuntimeError: an attention is not in the graph as the operator that stands for it.
        """
        attend = torch.ops.streamserve.attend
        parts: dict[torch.fx.Node, int] = {}
        part = 0
        found = []
        for node in graph.graph.nodes:
            # The overload is what some versions of torch put into the graph.
            is_attention = node.op == "call_function" and node.target in (attend, attend.default)
            if is_attention:
                found.append(node.args[4])
                node.target = self._attend
            part += is_attention
            parts[node] = part
            part += is_attention
        num_layers = self.config.num_layers
        if found != list(range(num_layers)):
            raise RuntimeError(f"split at the attentions of layers {found}, not of all {num_layers}")
        split: torch.fx.GraphModule = split_module(
            graph, graph, lambda node: parts[node], keep_original_order=True
        )
        children = list(split.named_children())
        assert len(children) == 2 * num_layers + 1, [name for name, _ in children]
        for index, (name, child) in enumerate(children):
            if not any(node.target == self._attend for node in child.graph.nodes):
                examples = [n.meta["example_value"] for n in child.graph.nodes if n.op == "placeholder"]
                delattr(split, name)
                setattr(split, name, self._inductor.compile(f"part {index // 2}", child, examples))
        forward: CompiledGraph = split.forward
        return forward

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int
    ) -> None:
        self._attention.forward(q, k, v, out, layer=layer, metadata=self._metadata)


@torch.library.custom_op("streamserve::attend", mutates_args=("out",))  # type: ignore[untyped-decorator]
def _attend_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Marks an attention in a traced forward; `WholeModel` puts the real one in its place."""
    raise NotImplementedError("stands for an attention in a graph that is not split")


@_attend_op.register_fake  # type: ignore[untyped-decorator]
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """It returns nothing."""


class _MarkedAttention:
    """What a traced forward calls."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: Any,
    ) -> None:
        torch.ops.streamserve.attend(q, k, v, out, layer)


class _NoAttention:
    """Leaves `out` as it is."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: Any,
    ) -> None:
        pass


def _first(
    model: LlamaModel,
    layer: LlamaLayer,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    buffers: ForwardBuffers,
) -> _QKV:
    hidden, cos, signed_sin = model.embed(token_ids, positions)
    buffers.hidden.copy_(hidden)
    buffers.cos.copy_(cos)
    buffers.signed_sin.copy_(signed_sin)
    return layer.project_qkv(buffers.hidden, buffers.cos, buffers.signed_sin)


def _middle(layer: LlamaLayer, following: LlamaLayer, buffers: ForwardBuffers) -> _QKV:
    layer.finish(buffers.hidden, buffers.attended)
    return following.project_qkv(buffers.hidden, buffers.cos, buffers.signed_sin)


def _last(model: LlamaModel, layer: LlamaLayer, buffers: ForwardBuffers) -> None:
    layer.finish(buffers.hidden, buffers.attended)
    buffers.hidden.copy_(model.last_norm(buffers.hidden))


def _whole(
    model: LlamaModel, token_ids: torch.Tensor, positions: torch.Tensor, buffers: ForwardBuffers
) -> None:
    model.forward(token_ids, positions, _MarkedAttention(), None, buffers)
