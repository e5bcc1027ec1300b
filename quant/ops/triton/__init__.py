"""The CUDA Ops: Triton kernels on packed weights."""
