"""The on-disk store: a packed model as one folder, written layer by layer, atomic and resumable.

A manifest, the tokenizer and the template, and one safetensors file a layer that other tools can
read. A unit (a layer's attention, its MLP, an expert, a slice of the head) is one contiguous range,
aligned to 4 KiB. Its matrices are tiles, read in one request and used in place. Files are written
under another name, synced and renamed, the folder last: a store exists whole or not at all. After a
kill, packing continues at the first unfinished layer and produces the same bytes. SHA-256 is
checked when a unit is first read whole. Packing a GGUF file keeps its widths.

``models/checkpoints/store/`` has the manifest and the reader: a store opens as a checkpoint.
"""

from localrt.offload.store.pack import Tiler, pack_store
from localrt.offload.store.writer import StoreWriter, partial_folder

__all__ = ["StoreWriter", "Tiler", "pack_store", "partial_folder"]
