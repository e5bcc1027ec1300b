"""The layers of all architectures: attention, MLPs, mixtures, recurrent layers; and blocks.

A layer may be only attention, only recurrent, or only an MLP (Nemotron-H): it then has one unit
instead of two. A recurrent layer may run in parallel with a layer's attention
(``ResidualBlock.beside``, Falcon-H1). Both read the same residual stream, belong to one unit, and
keep their memory in its usual place. Factors of their inputs are folded into norm weights, those of
queries and keys into the attention scale.

A layer may attend to an earlier layer's keys and values (``AttentionSpec.reads``). It then has no
projections of its own for them and takes no memory in caches, plans and saved conversations. The
planner keeps all attention of such a model on one device, since a cache is in one memory.
``quant/ops`` computes the layers. Start reading at ``parts.py`` and ``block.py``.
"""
