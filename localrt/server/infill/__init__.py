"""Filling in the middle for editors: llama.cpp's ``/infill`` and Mistral's completions."""
