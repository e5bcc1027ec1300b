"""Speculative decoding beside plain decoding and llama.cpp."""
