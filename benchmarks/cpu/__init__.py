"""Whole models on one instruction set, compared with llama.cpp and ik_llama.cpp built for it."""
