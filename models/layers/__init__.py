"""Layers of which architectures are made: attention, MLPs, mixtures, recurrent layers."""
