"""The CUDA Ops: our own kernels on packed weights, CUDA graphs."""
