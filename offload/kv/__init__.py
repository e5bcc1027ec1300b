"""Keys and values that live on an SSD, layer by layer: file, buffers, cache, and what makes them."""

from localrt.offload.kv.tier import KvTier

__all__ = ["KvTier"]
