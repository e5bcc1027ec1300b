"""GPUs as pipelines see them: memory of a fixed size, copies, kernels, and events between them."""
