#define LRT_PART 2
#include "kernels_avx2.cpp"
