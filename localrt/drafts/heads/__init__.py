"""Draft heads: small decoders that draft for one model and read its features.

Each kind has a module with its block and the reader of its config: MTP, EAGLE-3, Gemma 4's
assistants, DFlash. ``files.py`` opens heads and has the config of any kind; ``load.py`` reads their
weights and adds those shared with the model. Heads are published in the model's own files (MTP), as
folders or as GGUF files.
"""
