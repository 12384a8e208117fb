"""The process of one rank: model, KV cache, persistent batch, sampler. The only room with torch."""
