"""Keys and values on an SSD, layer by layer: the file, the buffers, the cache and its maker."""

from localrt.offload.kv.tier import KvTier

__all__ = ["KvTier"]
