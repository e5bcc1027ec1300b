"""The CPU's Ops: C++ kernels on numpy buffers, called through ctypes."""
