// Any processor.
#include "kernels.h"
#include "vec_portable.h"
#define KERNELS kernels_portable
#include "steps.h"
