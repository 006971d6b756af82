// Arithmetic of a device on given operands, compared with IEEE results before the device is trusted with reproducible bytes.
// Launched by memtrain_cl/probe.py; a work-item owns one element.
#pragma OPENCL FP_CONTRACT OFF

#include "_rng.cl"

// a, b float32 [n] -> quotient a/b, root sqrt(|a|), cross a*b - b*c with c = a's neighbour, and hash_u32 of a's bits.
__kernel void arithmetic_probe(const __global float *a, const __global float *b, __global float *quotient, __global float *root,
                               __global float *cross, __global uint *hashed, const uint n) {
    const uint i = get_global_id(0);
    if (i >= n) return;
    const float c = a[(i + 1) % n];
    quotient[i] = a[i] / b[i];
    root[i] = sqrt(fabs(a[i]));
    cross[i] = a[i] * b[i] - b[i] * c;
    hashed[i] = hash_u32_1(as_uint(a[i]));
}
