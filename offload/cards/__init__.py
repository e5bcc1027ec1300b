"""Cards: memory of a hard size, copies and kernels with marks; CUDA's, and a virtual one."""
