"""Reading units from the SSD ahead of the pass that needs them, and copying them to a GPU.

Units that do not stay in memory pass through a ``Ring``: a fixed, page-aligned buffer, filled in
the order of the pass. A unit is contiguous and is used where it was read. It is read in chunks,
each as soon as its target bytes are free, so a ring little larger than its largest unit keeps the
disk busy. Every megabyte of ring is a megabyte of weights that is read again for every token; heads
are stored in slices of 8 MB for the same reason.

The threads of a ``UnitReader`` fetch the next units in a fixed cyclic order, which wraps round the
model's end into the next token. Each stage waits only for its own unit. When bytes of a ring are
released, the event of their last use is passed on: the next writer waits for exactly that. Errors,
stalls and cancellation reach the waiting pass; the next pass begins with the first unit.
``disk_speed.py`` measures the best way to read the disk (direct or cached, threads, block size).
Pages that were read through the cache are dropped.
"""
