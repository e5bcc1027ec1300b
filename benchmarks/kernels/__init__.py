"""Single CPU kernels beside ggml's."""
