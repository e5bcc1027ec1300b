"""The CPU's Ops: C++ kernels on numpy buffers, called through ctypes.

It knows neither torch nor files. Start reading at ``ops.py``.

``NativeOps`` runs the same steps on numpy buffers through C++ (``quant/cpu/csrc``), called with
ctypes, without torch. One C call is one fused step. ``tile.cpp`` converts GGUF rows, ``formats.h``
reads tiles.

Numbers. Codes are unsigned; activations are signed int8 with a float32 scale per 32 columns. A
symmetric layout's zero point is the integer that its sum starts from; a minimum is multiplied by
the activations' sum. FP4 and NF4 go through a byte shuffle. For FP4 it gives twice the E2M1 value
plus 12, which is exact; NF4's levels are rounded to 1/127, within 0.4 % of the group's largest
magnitude.

Few rows. Up to four rows, a step of weights is unpacked into registers and used for all rows at
once. Reading decides the speed, so tasks go from long to short, and memory is prefetched 4 KB ahead
to L2. (The portable path does this for one row only: four rows in 22 layouts took half a minute to
compile.)

Many rows use panels. With AVX-512, two tiles of 512 columns are unpacked to bytes once and reused
for six rows at a time, with 24 sums in registers (elsewhere one tile and three rows). The next
panel's bytes are fetched at the same time. The panel kernel does not know the format. It runs at 80
% of the int8 peak when the panel is in the cache (73 % with minima). An MLP's gate and up tiles
share a panel, so the gate is applied and the next matrix's codes are made before anything is
written. What has no gate is written once.

Matrices of floats become float32 panels for many rows (``blocks.h``): 80 % of the processor's peak,
three times what few rows' loop gives, in the same order of sums.

Vision encoders (``vision.py``, ``csrc/vision.h``). A pass has a few thousand rows, and nothing is
cached between passes: attention packs a head's keys and values for the products and visits blocks
of keys with an online softmax. AMX multiplies in bf16 there, six times as fast as float32,
and so does AVX-512 where it has products of bf16 (``kernels_bf16.cpp``), nearly twice as fast:
matrices of 16 bits, with AMX packed ones too, become bf16, a panel at a time (``blocks_brain.h``).

Instruction sets. The kernels are templates over sixteen lanes (``vec_*.h``: AVX-512, AVX2, NEON,
plain arrays), compiled once per instruction set with a target pragma; the library picks one at run
time. These files use no shared inline function of the standard library: the linker might take the
copy that was compiled for the newest instruction set. All of them give the same bits (but for
vision encoders in bf16): lanes are summed in one order, and the compiler may not fuse a product and
a sum that are written apart (``-ffp-contract=off``), which costs nothing, since the kernels name
their fused ones. ``scripts/neon`` shows it for ARM, emulated.

Batch invariance. Every output is summed over the columns in one fixed order. The number of rows
only decides how many share an unpacked step of weights. Attention goes over blocks of 256 keys and
joins their results in order, however many threads computed them. Tests compare bit for bit: rows
1-64, one and two threads, chunked and whole prefill, batches of sequences, instruction sets.

KV cache. Keys are cached in tiles of 16, so that 16 scores come at once without horizontal sums, in
blocks of 256 tokens with one piece per head. The formats (``kv_format``) are bf16, int8 with a
scale per token and head, and int4 with a scale per 32 numbers. int4 keeps keys in 6 bits and values
in 4, because keys lose several times as much in the same bits. Quantized keys and values are stored
times a Hadamard matrix, which spreads a head's few large numbers over all of them. Queries are
rotated too, and the result of attention is rotated back, so only the rounding changes. Quantized
keys are stored without the bias of their projection: it is large, the same for all tokens, and
would set the scale. Attention adds it back. int8 keys and values are multiplied in pairs, with
queries and attention weights of 16 bits: exact sums in 32 bits, at up to twice float32's rate. A
cache maps its whole capacity and takes memory as it is written. Layers may live on the SSD
(``offload/kv``) and are loaded before their attention.

Decode steps. Python between the kernels costs more than it seems: the caches are full of weights.
``replay.py`` records the calls of a model's first decode step and repeats them with another token,
position and cache, unless Python computes some of its numbers. A token of SmolLM2-135M then takes
0.16 ms outside the kernels.

A layer of such a step is two lists of tasks: a mixer from its projections to its output, and an MLP
or a mixture. Tasks are taken in order and wait for the part of their input that they read, a head's
keys or some columns, which is mostly there (``Countdown``, ``Acts::ready``). So all threads meet
twice a layer, and once more where experts are chosen or latents normed; who ends a part norms,
rotates, convolves or quantizes it, and the others read weights meanwhile.

Threads. The pool hands out numbered tasks from one atomic ticket, which holds the job's number and
how many of its tasks are left. A worker whose core is busy with something else takes no task and
holds nobody up; counting workers instead of tasks cost 0.5 ms per product with one busy core. On
virtual machines Linux often takes an idle core for a busy one. It then wakes a worker on the
caller's core and leaves both there for ten milliseconds. The pool therefore bars that core to a
worker until it is awake: a pass of SmolLM2 after a pause of 20 ms takes 3.7 ms instead of 6.8.

``scripts/sanitize`` runs the kernel tests under the address and undefined-behaviour sanitizers.
"""
