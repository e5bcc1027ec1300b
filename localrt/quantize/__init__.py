"""Quantizing a model, layer by layer: the driver of the methods in quant/methods.

Start reading at ``quantize.py``.

For each layer it observes the inputs with the original weights, quantizes the matrices, and passes
the text on through the quantized ones. Only hidden states, one layer and its statistics are in
memory. The rotation of the output projection's input is folded into the rows of V if the block size
divides the head size. Elsewhere ``hadamard`` on a tensor tells the kernels to rotate its
activations, in registers, before they are quantized. Q, K and V share rotation and scale, as do
gate and up.
"""
