"""Our own CUDA kernels (``quant/cuda``): compiling, launching, and who asks for which."""
