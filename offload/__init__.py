"""Runs models larger than memory: places weights, moves them, and accounts for memory.

``localrt.load`` compares a model with its budget. One that fits is loaded whole. Otherwise it is
packed into a store, once (``store/pack.py``), and the machine is measured, once, in a process of
its own. The planner, from rates and bytes alone, searches ring sizes and placements by rules,
scores them by replaying the schedule, and chooses a ``Placement``. ``pipeline/opening.py`` carries
it out.

Resident units are in RAM or on a GPU. Other units pass through a ``Ring`` in each pass: read from
the SSD by ``reading/``, copied to a GPU over the link. A mixture's experts have slots of their own
(``experts/``); keys and values may be on the SSD (``kv/``). The output does not depend on the
placement: on one device it is bit for bit the resident model's.

The budget is a hard limit for the whole process: interpreter and libraries, activations, scratch,
rings, weights, keys and values, logits. ``account.py`` computes every part; their peak is
``Model.status().ram.forecast``. ``tests/memory`` compares budgets, forecasts and peaks of real
processes. The process that measures the machine counts too: if it does not fit, it uses less
memory, or rates are assumed.

A damaged packed copy is made again from the model: at once if loading finds the damage, otherwise
when the model is loaded next.

Read ``placement.py`` first, then ``pipeline/``.
"""
