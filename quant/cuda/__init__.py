"""The CUDA Ops: our own kernels on packed weights, CUDA graphs.

It does not know who calls it. Start reading at ``ops.py``: the steps, which call the files of their
names. ``linear.py`` chooses between our products and cuBLAS, ``products.py`` has ours, and
``launch.py`` starts what ``programs.py`` compiles. Beneath them ``driver.py`` has every call of
CUDA's driver, ``memory.py`` pools of a GPU's memory, and ``tensor.py`` numbers in it, which know
their shape and compute nothing. torch is asked for two things, where it is installed: cuBLAS, and a
profiler.

``CudaOps`` computes on the same tiles as the CPU. Packed weights are multiplied by CUDA
kernels of our own (``quant/cuda/src``), which NVRTC compiles for the GPU at hand; what was compiled
is kept on the disk. Which ones a model needs is found by passes through its parts without weights,
on ``Ops`` that note what they would launch (``localrt/loading/kernels.py``,
``quant/cuda/dry_run.py``). They are compiled on up to four threads while weights load, so that the
first prompt compiles nothing.

The kernels' tests run on the CPU (``tests/ops/cuda``): g++ compiles them against a header that has
the GPU's few instructions, and coroutines run their threads in a shuffled order. ``tests/driver``
runs whole models so, by CUDA's bindings on a ``libcuda.so.1`` of its own. Other tests
compile them for every generation of GPUs. ``scripts/gpu_check`` tests them on a GPU;
``docs/gpu.md`` has its results.

Products of 1 to 64 rows (``sums.cuh``). Activations are quantized to 8 bits per 32 columns, as on
the CPU, by the norm that makes them where that can be. A lane loads 16 bytes of a tile. They are
four weight rows of eight columns, which is what the integer product (``mma.m16n8k32``) takes from a
lane: nothing passes through shared memory, and one row costs what four do. Codes below 8 bits are
unpacked by two or three instructions a word. Levels (NF4, FP4) come from byte permutations of two
tables of magnitudes, the negative ones multiplied by -x. With ``--activations bf16`` a row is kept
in 15 bits: as two rows of 8, whose results are added. Sums of a step are whole numbers; scales are
applied and added in the order of the columns. Columns are dealt out to at most eight chains, which
are joined as a tree. Their number follows from the columns alone, so a row's bits are the same
among any others, and however the work is cut. Short matrices share a chain's columns among blocks
(``launch_shape.py``). A format is two structs (``formats.cuh``): one unpacks its words, the
other reads its scales. ``tests/ops/cuda/test_compiled.py`` compiles every format and counts
registers, spills and instructions per byte. Beyond 64 rows the tiles pass through shared memory
(``linear_many.cu``); data centers' GPUs unpack them to bf16 for cuBLAS.

Attention (``quant/cuda/src/attention.cu``) passes keys and values through registers only: 16 query
rows of the heads that share them are multiplied at once. Up to 64 rows are split over fixed runs of
256 keys; sinks are added where the runs are joined. For prompts each warp takes all keys its rows
see, and no mask or score is ever in memory. Keys and values are bf16, int8 or int4
(``quant/cuda/src/kv.cuh``), in the CPU's numbers: rotated, a token's bytes of one head together.
Keys keep the bias of their projection there. Latent attention (``quant/cuda/src/latent.cu``) stages
a cached row once as key and value. A layer's experts are two launches
(``quant/cuda/experts.py``), wherever they lie. A dense layer's step is ten launches. A pass
of a shape seen before is replayed as a CUDA graph (``quant/cuda/graph.py``, ``capture.py``), also
of a mixture whose experts are all on the GPU: it ranks them itself (``quant/cuda/src/choose.cu``),
and the host never sees the choice. Formats without a kernel fall back to bf16 per weight; without
our kernels, NF4 goes through bitsandbytes.
"""
