"""Single CPU kernels compared with ggml's."""
