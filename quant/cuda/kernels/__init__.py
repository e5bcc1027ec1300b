"""Our own CUDA kernels (``quant/cuda/src``): compiling, launching, and who asks for which."""
