"""The Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM2.

Q, K and V are one matrix, gate and up another: fewer, larger multiplications. The checkpoint's tensors are
views into them (`destinations`), so loading copies each weight straight to its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear

from streamserve.worker.attention.base import Attention
from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.models.cpu_product import Product, cpu_product, product_bytes
from streamserve.worker.models.linear import Linear
from streamserve.worker.models.operations import LayerOperations, TorchOperations
from streamserve.worker.models.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class ForwardBuffers:
    """Memory that outlives a forward, for what every layer of it reads or writes.

    Attributes:
        hidden: [t, hidden_size], the residual stream and in the end the result.
        cos, signed_sin: [t, 1, head_dim], see `RotaryEmbedding.at`.
        attended: [t, num_heads * head_dim], what attention writes.
    """

    hidden: torch.Tensor
    cos: torch.Tensor
    signed_sin: torch.Tensor
    attended: torch.Tensor

    @classmethod
    def allocate(
        cls, config: DecoderConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> ForwardBuffers:
        """For forwards of up to `count` tokens; all zero, so that no row is ever anything but a number."""
        width = config.num_heads * config.head_dim
        shapes = ((config.hidden_size,), (1, config.head_dim), (1, config.head_dim), (width,))
        return cls(*(torch.zeros((count, *shape), dtype=dtype, device=device) for shape in shapes))

    def rows(self, count: int) -> ForwardBuffers:
        """The same memory for a forward of `count` tokens."""
        return ForwardBuffers(
            self.hidden[:count], self.cos[:count], self.signed_sin[:count], self.attended[:count]
        )


class LlamaLayer:
    """Parameters of one decoder layer and what they do to the residual stream.

    Args:
        config: the model's.
        dtype, device: of the parameters, which start uninitialised.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        def projection(out_size: int, in_size: int, has_bias: bool) -> Linear:
            return Linear(out_size, in_size, has_bias=has_bias, dtype=dtype, device=device)

        def norm(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._config = config
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm, self.post_norm = norm(hidden), norm(hidden)
        self.qkv = projection(self._q_size + 2 * self._kv_size, hidden, config.qkv_bias)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = projection(hidden, self._q_size, config.output_bias)
        self.gate_up = projection(2 * inner, hidden, config.mlp_bias)
        self.down = projection(hidden, inner, config.mlp_bias)
        self._operations: LayerOperations = TorchOperations()

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its name within the layer."""
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        qkv = {"q_proj": self._q_size, "k_proj": self._kv_size, "v_proj": self._kv_size}
        attention = self.qkv.destinations(qkv) | self.output.destinations({"o_proj": hidden})
        if self.q_norm is not None and self.k_norm is not None:
            attention |= {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        gate_up = self.gate_up.destinations({"gate_proj": inner, "up_proj": inner})
        mlp = gate_up | self.down.destinations({"down_proj": hidden})
        return {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
            **{f"self_attn.{name}": tensor for name, tensor in attention.items()},
            **{f"mlp.{name}": tensor for name, tensor in mlp.items()},
        }

    def use(self, operations: LayerOperations) -> None:
        """From now on computes with `operations` what lies between the matrix products."""
        self._operations = operations

    def pack(self) -> None:
        """See `Linear.pack`."""
        for projection in self._projections():
            projection.pack()

    def num_bytes(self, *, packed: bool) -> int:
        """See `Linear.num_bytes`."""
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm)
        return sum(int(norm.nbytes) for norm in norms if norm is not None) + sum(
            projection.num_bytes(packed=packed) for projection in self._projections()
        )

    def _projections(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def project_qkv(
        self, hidden: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K (both turned) and V of `hidden` [t, hidden_size], each [t, heads, head_dim]."""
        config = self._config
        normed = self._operations.norm(hidden, self.input_norm, config.rms_norm_eps)
        heads = self.qkv(normed).view(hidden.shape[0], -1, config.head_dim)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        return self._operations.turn(
            heads,
            cos,
            signed_sin,
            norms,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            epsilon=config.rms_norm_eps,
        )

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Adds the projection of `attended` [t, num_heads * head_dim] to `hidden`, and the MLP of that."""
        projected = self.output(attended)
        normed = self._operations.add_norm(hidden, projected, self.post_norm, self._config.rms_norm_eps)
        hidden.add_(self.down(self._operations.gate(self.gate_up(normed))))


class LlamaModel:
    """Embedding, decoder layers and output projection.

    Args:
        config: the model's.
        dtype, device: of the parameters, which start uninitialised.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [LlamaLayer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = torch.empty(shape, dtype=dtype, device=device)
        self._to_logits: Product | None = None
        self._operations: LayerOperations = TorchOperations()
        self._rope = RotaryEmbedding(config.rope, config.head_dim, dtype, device)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its full name; together, every parameter once."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            named |= {f"model.layers.{index}.{name}": t for name, t in layer.destinations().items()}
        return named

    def num_bytes(self, *, packed: bool) -> int:
        """Bytes of all parameters, as they are loaded or as `pack` will leave them; to be asked before it."""
        copies = product_bytes(self.lm_head, None) if packed else None
        to_logits = int(self.lm_head.nbytes) if copies is None else copies
        if copies is None and self.config.tie_word_embeddings:
            to_logits = 0
        own = int(self.embedding.nbytes) + int(self.norm.nbytes) + to_logits
        return own + sum(layer.num_bytes(packed=packed) for layer in self.layers)

    def use(self, operations: LayerOperations) -> None:
        """See `LlamaLayer.use`."""
        self._operations = operations
        for layer in self.layers:
            layer.use(operations)

    def pack(self) -> None:
        """Puts the loaded matrices into the form that the processor multiplies fastest.

        Nothing can be loaded after this. Where the output projection is the embedding, it becomes a copy.
        """
        for layer in self.layers:
            layer.pack()
        self._to_logits = cpu_product(self.lm_head, None)
        if self._to_logits is not None:
            del self.lm_head

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers | None = None,
    ) -> torch.Tensor:
        """Runs all tokens of a step. Hot: once a step.

        Args:
            token_ids: int32[t].
            positions: int64[t].
            attention: writes K and V to the cache and attends.
            metadata: `attention.build` of this step.
            buffers: of t rows, for a forward that is captured: nothing but them, the inputs and what
                attention is called with is read behind an attention and written before it. None allocates.

        Returns:
            [t, hidden_size], normed; with `buffers`, their `hidden`.
        """
        hidden, cos, signed_sin = self.embed(token_ids, positions)
        if buffers is None:
            width = self.config.num_heads * self.config.head_dim
            attended = torch.empty((hidden.shape[0], width), dtype=hidden.dtype, device=hidden.device)
        else:
            hidden, attended = buffers.hidden.copy_(hidden), buffers.attended
            cos, signed_sin = buffers.cos.copy_(cos), buffers.signed_sin.copy_(signed_sin)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project_qkv(hidden, cos, signed_sin)
            attention.forward(q, k, v, attended, layer=index, metadata=metadata)
            layer.finish(hidden, attended)
        normed = self.last_norm(hidden)
        return normed if buffers is None else hidden.copy_(normed)

    def embed(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the layers begin with: hidden [t, hidden_size] and the two of `RotaryEmbedding.at`."""
        return embedding(token_ids, self.embedding), *self._rope.at(positions)

    def last_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[t, hidden_size] as the layers leave it → as `logits` takes it."""
        return self._operations.norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[k, vocab_size] of rows [k, hidden_size] out of `forward`."""
        if self._to_logits is not None:
            return self._to_logits(hidden).to(torch.float32)
        return linear(hidden, self.lm_head).to(torch.float32)
