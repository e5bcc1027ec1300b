"""Whole models on one instruction set, beside llama.cpp and ik_llama.cpp built for the same one."""
