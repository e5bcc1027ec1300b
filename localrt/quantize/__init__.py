"""Quantizing a model, layer by layer: the driver of the methods in quant/methods."""
