"""Quantizing a model, layer by layer: the driver of the methods in quant/methods.

Start reading at ``quantize.py``.

For each layer it observes the inputs with the original weights, quantizes the matrices, and passes
the text on through the quantized ones. Only hidden states, one layer and its statistics are in
memory. The rotation of the output projection's input is folded into the rows of V if the block size
divides the head size. Elsewhere ``hadamard`` on a tensor tells the kernels to rotate its
activations, in registers, before they are quantized. Q, K and V share rotation and scale, as do
gate and up.

``losses.py`` and ``mix.py`` choose a format for each group of matrices. Each layer alone is rounded
to some three bits, and the divergence of the final logits is measured; the hidden states of all
these copies pass through the layers together, so that each layer is read once. A layer's loss is
divided among its groups of matrices by how far each moves the layer's output, and scaled to other
formats by the squared errors of the matrices' outputs. The choice goes along each group's convex
hull of loss and bytes, best step first. Small losses of single layers add up. The loss of the
finished mix is measured too, and scales the losses that plans predict for other sizes.
"""
