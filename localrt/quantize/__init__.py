"""Quantizing a model, layer by layer: the driver of the methods in quant/methods.

Start reading at ``quantize.py``.

It goes layer by layer. It observes the inputs with the
layer's own weights, quantizes its matrices, and passes the text on through the quantized ones. Only
hidden states, one layer and its statistics are in memory. The rotation of the output projection's
input is folded into the rows of V where a block divides the head size. Elsewhere ``hadamard`` on a
tensor tells the kernels to rotate its activations, in registers, before they are quantized. Q, K
and V share rotation and factor, as do gate and up.

``losses.py`` and ``mix.py`` choose a format for each group of matrices. Each layer is rounded alone
to some three bits, and the divergence of the answers at the end is measured; the hidden states of
all such copies pass through the layers side by side, so that each layer is read once. A layer's
loss is shared out among its groups of matrices by how far each moves the layer's output, and over
formats by the squared errors of what the matrices give. The choice goes along each group's convex
hull of loss and bytes, best step first. Losses of single layers add up as long as they are small;
what the finished mix loses is measured too, and scales what plans say of other sizes.
"""
