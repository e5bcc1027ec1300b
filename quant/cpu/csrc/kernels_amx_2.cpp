#define LRT_PART 2
#include "kernels_amx.cpp"
