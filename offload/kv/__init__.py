"""Keys and values on an SSD, layer by layer: the file, the buffers, the cache and its maker.

Start reading at ``cache.py``.
"""
