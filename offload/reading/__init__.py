"""Reading units from the SSD ahead of the pass that needs them, and copying them to a GPU.

Units that do not stay in memory pass through a ``Ring``: a fixed, page-aligned buffer, filled in
the order of the pass. A unit lies contiguously and is used where it was read to. It is read in
chunks, each as soon as the bytes it goes to are free, so a ring little larger than its largest unit
keeps the disk busy. Every megabyte of ring is a megabyte of weights that is read again for every
token; heads are stored in slices of 8 MB for the same reason.

The threads of a ``UnitReader`` fetch the next units in a fixed cyclic order, which wraps round the
model's end into the next token. A stage waits for its own unit only. When bytes of a ring are
released, the event of their last use is passed on: the next writer waits for exactly that. Errors,
stalls and cancelling reach the pass that waits; the next pass begins with the first unit. How the
disk is read (direct or through the page cache, threads, block size) is what measured best
(``disk_speed.py``). Pages that were read through the cache are dropped.
"""
