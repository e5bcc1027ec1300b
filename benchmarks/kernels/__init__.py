"""Single CPU kernels, and passes of few rows, beside llama.cpp."""
