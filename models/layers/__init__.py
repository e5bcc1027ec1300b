"""Layers of which architectures are made: attention, MLPs, mixtures, recurrent layers; and blocks.

A layer may be attention or a recurrent layer alone, or an MLP alone (Nemotron-H): it then has one
unit instead of two. A recurrent layer may be side by side with a layer's attention
(``ResidualBlock.beside``, Falcon-H1). Both see the residual stream as it is before either joins it,
belong to one unit, and keep what they remember where their kind does. Factors of what they see are
in their norms' weights, and those of queries' and keys' products in the scale of attention.

A layer may attend to an earlier layer's keys and values (``AttentionSpec.reads``). It then has no
projections of its own for them and takes no memory in caches, plans and saved conversations. The
planner keeps all attention of such a model on one processor: a cache is in one memory.

What layers compute is ``quant/ops``'s. Start reading at ``parts.py`` and ``block.py``.
"""
