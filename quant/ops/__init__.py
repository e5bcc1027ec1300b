"""The steps of a model: one protocol, and what its native, torch and CUDA implementations share.

It knows neither architectures nor text. Start reading at ``protocol.py``, the steps; then
``attention.py``, ``recurrent.py``, ``experts.py`` and ``streams.py`` (shapes, weights and choices
that steps take), ``kv.py`` and ``states.py`` (what sequences remember), ``adapters.py``.
``quant/choose.py`` picks the implementation for a device.

Above an implementation, arrays are opaque. The steps are fused as batch 1 needs them:
``norm_qkv_rope_append``, ``attention_output``, ``norm_gated_mlp``, ``head``. Q, K and V are one
stacked matrix, as are gate and up, so a fused checkpoint (Phi-3) and a split one look the same. A
squared ReLU has no gate: ``gate_up`` is up alone. A pass is a ``Batch`` of rows in ``Span``s, one
per sequence. Each span has its KV cache and, for trees, a mask among the new rows. A pass appends
to the caches but counts the rows only when it is done, so cancelling between layers leaves no
trace.
"""
