"""Draft heads: small decoders that draft for one model and read its features.

A kind is a file, with its block and the reader of its config: MTP, EAGLE-3, Gemma 4's assistants,
DFlash. ``files.py`` opens them, ``load.py`` reads their weights around what they share with their
model. They are published in the model's own files (MTP), as folders or as GGUF files.
"""
