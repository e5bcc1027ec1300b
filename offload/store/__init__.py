"""The on-disk store: a packed model as one folder, written layer by layer, atomic and resumable.

Its manifest and reading are in ``models/checkpoints/store/``: a store opens as a checkpoint.
"""

from localrt.offload.store.pack import Tiler, pack_store
from localrt.offload.store.writer import StoreWriter, partial_folder

__all__ = ["StoreWriter", "Tiler", "pack_store", "partial_folder"]
