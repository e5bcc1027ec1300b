"""The CUDA Ops: our own kernels on packed weights, CUDA graphs.

It does not know who calls it. Start reading at ``ops.py``.

``CudaOps`` computes on the same tiles, as torch tensors. Packed weights are multiplied by CUDA
kernels of our own (``quant/cuda/src``), which NVRTC compiles for the GPU at hand; what was compiled
is kept on the disk. Which ones a model needs is found by passes through its parts without weights,
on ``Ops`` that note what they would launch (``localrt/loading/kernels.py``,
``quant/cuda/sketch.py``). They are compiled on up to four threads while weights load, so that the
first prompt compiles nothing.

The kernels' tests run on the CPU (``tests/ops/cuda``): g++ compiles them against a header that has
the GPU's few instructions, and coroutines run their threads in a shuffled order. Other tests
compile them for every generation of GPUs. ``scripts/gpu_check`` tests them on a GPU;
``docs/gpu.md`` has its results.
"""
