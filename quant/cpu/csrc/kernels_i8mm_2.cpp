#define LRT_PART 2
#include "kernels_i8mm.cpp"
