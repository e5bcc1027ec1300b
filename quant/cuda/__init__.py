"""The CUDA Ops: our own kernels on packed weights, CUDA graphs.

Start reading at ``ops.py``: each step is in the file of its name. ``linear.py`` chooses between our
GEMM kernels and cuBLAS, ``products.py`` launches ours, and ``launch.py`` starts what
``programs.py`` compiles. Beneath them, ``driver.py`` makes every call of the CUDA driver,
``memory.py`` pools GPU memory, and ``tensor.py`` has views of it (address, shape, strides, type)
that compute nothing. torch, if installed, is used for cuBLAS only.

``CudaOps`` computes on the same tiles as the CPU. Packed weights are multiplied by CUDA kernels of
our own (``quant/cuda/src``), which NVRTC compiles for the GPU at hand; the machine code is cached
on disk. Loading ends with passes that launch every kernel (``localrt/loading/first_passes.py``), so
that the first prompt compiles nothing.

``pytest -m gpu`` tests it on a GPU if there is one, else on the CPU: g++ compiles the kernels
against a header that emulates the GPU instructions they use, and coroutines run their threads in a
shuffled order (``tests/ops/cuda``). ``tests/driver`` runs whole models this way, through CUDA's
bindings and a stand-in ``libcuda.so.1``. Other tests compile the kernels for the oldest and the
newest generation of GPUs. ``scripts/gpu_check`` runs them on a GPU, and measures; ``docs/gpu.md``
has its results.

Products of 1 to 64 rows (``sums.cuh``). Activations are quantized to 8 bits per 32 columns, as on
the CPU, by the norm kernel itself if possible. A lane loads 16 bytes of a tile: four weight rows of
eight columns, exactly its operand of the integer product (``mma.m16n8k32``), so nothing passes
through shared memory and one activation row costs as much as four. Codes below 8 bits are unpacked
by two or three instructions a word. Levels (NF4, FP4) come from byte permutations of two tables of
magnitudes, the negative ones multiplied by -x. With ``--activations bf16`` a row is quantized to 15
bits: two rows of 8 bits, whose results are added. The sum of a step of 32 columns is an integer;
scaled sums are added in column order. Columns are dealt out to at most eight chains, which are
joined as a tree. The number of chains depends on the columns alone, so a row's bits do not depend
on the batch or the launch shape. For short matrices several blocks share a chain's columns
(``launch.py``). A format is two structs (``formats.cuh``): one unpacks its words, the other
reads its scales. ``tests/ops/cuda/test_compiled.py`` counts registers, spills and
instructions per byte. Beyond 64 rows the tiles pass through shared memory
(``linear_many.cu``); data centers' GPUs unpack them to bf16 for cuBLAS.

Attention (``quant/cuda/src/attention.cu``) passes keys and values through registers only: 16 query
rows of the heads that share them are multiplied at once. Up to 64 rows are split over fixed runs of
256 keys; sinks are added where the runs are joined. In prefill, each warp loops over all keys that
its rows see, and no mask or score is ever in memory. Keys and values are bf16, int8 or int4
(``quant/cuda/src/kv.cuh``), quantized and rotated as on the CPU; a token's bytes of one head are
adjacent. Unlike on the CPU, keys keep their projection's bias. Latent attention
(``quant/cuda/src/latent.cu``) stages a cached row once as key and value. A layer's experts take two
launches (``quant/cuda/experts.py``), wherever their weights are in memory; a dense layer in
decoding takes ten. A pass of a shape seen before is replayed as a CUDA graph
(``quant/cuda/graph.py``). So is that of a mixture whose experts are all on the GPU,
which chooses them itself (``quant/cuda/src/choose.cu``) without the host. Formats without a kernel
fall back to bf16 per weight.
"""
