"""What a model is, not how it is run: architectures, layers, checkpoints and tokenizers.

A forward pass is a list of parts (``layers/parts.py``, ``attention.py``, ``moe.py``): embedding,
attention and MLP of each layer, head. A part changes the ``PassState`` that it is called with (the
residual stream, and the ``Ops`` that computes). The config's ``Block`` (``layers/block.py``, ...)
says how the outputs of attention and MLP join the residual stream; the decoder does not know how.
``Decoder`` (``decoder.py``) runs the list. A ``WeightStore`` (``weight_store.py``) knows where the
weights are: with ``ResidentWeights`` all parts are ready, while the pipeline's parts wait for their
weights. Neither the decoder nor the engine knows which one it has. Start reading at ``decoder.py``,
then
``layers/parts.py`` and ``architectures/llama.py``; ``units.py`` says what is stored, placed and
moved as one.
"""
