"""The benchmark: engines side by side on one workload, each in a process of its own.

Start reading at ``runner.py``.

Each engine runs in a child process, so that peak memory is its own. Runs of the engines alternate,
so that noise affects all alike; engines that read weights while they run go one after another.
llama.cpp is measured with its weights repacked or not and flash attention on or off, and its best
result counts. The JSON uses the names of ``Metrics``. With a GPU each engine reads one long prompt
too, and ours decodes some tokens while the profiler looks on (``quant/cuda/counting.py``): busy
shares of GPU, link and CPU, launches and waits of a token, and the change that the planner finds
best.
"""
