"""The benchmark: compares engines on one workload, each in a separate process.

Start reading at ``runner.py``. ``sweep.py`` repeats it for values of an option, or for models;
``report.py`` has the table, and ``page.py`` shows it with plots.

Each engine runs in a child process, so that its peak memory is measured alone. Runs of the engines
alternate, so that noise affects all alike; if an engine reads weights while it runs, engines run
one after another instead, as on a GPU, where each keeps to the same memory. llama.cpp is measured
with and without repacked weights and flash attention, and its best result counts. The JSON uses the
names of ``Metrics``. With a GPU each engine also reads one long prompt, and ours says how busy GPU,
link and CPU are while it decodes, and which change would help most.
"""
