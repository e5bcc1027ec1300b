#define LRT_PART 2
#include "kernels_avx512.cpp"
