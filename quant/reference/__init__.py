"""The torch Ops: the reference, on any device that torch has.

It knows formats by their float32 values alone. Start reading at ``ops.py``.

``TorchOps`` unpacks to bf16 (float32 with ``format="f32"``). It is simple, runs on GPUs, and is
what the native implementation is tested against. Two measurements shaped it. oneDNN keeps a
compiled kernel per shape and memory grew by 1.3 MB per token, so decode attention rounds lengths up
to 64. SDPA costs over 100 us at one row, so one row takes two batched matmuls. It is not
batch-invariant.
"""
