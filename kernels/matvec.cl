// Products of matrices with vectors, which read each element of the matrix once, and the sum of parts of a product.
//
//   matvec      out[z, m] = sum_k a[z, m, k] * x[z, k]          MATRIX "rows": a[m*lda + k]    "columns": a[k*lda + m]
//   sum_parts   out[z, m, n] = sum_s parts[z*splits + s, m, n]
//
// EPILOGUE: out = alpha * (the sum) + beta * add, where add[z*add_z + m*add_m + n*add_n] is not read when beta is 0 (n is 0 for
// matvec). As in kernels/matmul.cl the third dimension of matvec's launch counts z * splits + split, each split of K makes a
// result of its own, and sum_parts sums them in their order. x and out have no gaps. Sums are float32.
//
// rows, GPU: a group of 256 items takes 256 / LANES rows, LANES items each. columns, GPU: a group of 32 by 8 items takes 32 columns.
// CPU: a work-item takes m_per rows, or as many columns with their sums in local memory. Launched by memtrain_cl/launchers/matmul.py.
// Constants: GPU, MATRIX, IN_TYPE, OUT_TYPE, EPILOGUE, LANES (1 on CPUs), GATE (as in kernels/matmul.cl).
<% HELD = 1024 %>
#include "_types.cl"

inline float in_1(const __global ${stored(IN_TYPE)} *p, const size_t i) { return ${load(IN_TYPE, "p", "i")}; }
% if not GPU:
inline float8 in_8(const __global ${stored(IN_TYPE)} *p, const size_t i) {
% if IN_TYPE == "float16":
    return vload_half8(0, p + i);
% elif IN_TYPE == "bfloat16":
    return as_float8(convert_uint8(vload8(0, p + i)) << 16);
% else:
    return vload8(0, p + i);
% endif
}
% endif
<%def name="epilogue_parameters()">
% if EPILOGUE:
            const __global ${stored(OUT_TYPE)} *add, const ulong add0, const ulong add_z, const ulong add_m, const ulong add_n,
            const float alpha, const float beta,
% endif
% if GATE:
            const __global long *gate,
% endif
</%def>

<%def name="finish(z, m, n, at, sum)">
% if EPILOGUE:
            ${sum} *= alpha;
            if (beta != 0.0f) ${sum} += beta * ${load(OUT_TYPE, "add", f"add0 + {z} * add_z + {m} * add_m + {n} * add_n")};
% endif
            ${store(OUT_TYPE, "out", at, sum)};
</%def>
${"__kernel __attribute__((reqd_work_group_size(32, 8, 1)))" if GPU and MATRIX == "columns" else "__kernel __attribute__((reqd_work_group_size(256, 1, 1)))" if GPU else "__kernel __attribute__((reqd_work_group_size(1, 1, 1)))"}
void matvec(const __global ${stored(IN_TYPE)} *a, const __global ${stored(IN_TYPE)} *x, __global ${stored(OUT_TYPE)} *out,
            ${epilogue_parameters()}
            const ulong a0, const ulong x0, const ulong out0, const ulong a_z, const ulong x_z, const ulong out_z,
            const uint ${"all_rows" if GATE else "M"}, const uint K, const uint lda, const uint m_per, const uint k_per, const uint splits) {
% if GATE:
    // As in kernels/matmul.cl: nothing of no rows.
    const uint M = gate[2] == 0 ? 0 : all_rows;
% endif
    const uint part = get_global_id(2);
    const uint z = part / splits;
    const uint k_first = (part - z * splits) * k_per;
    const uint k_last = min(k_first + k_per, K);
    a += a0 + z * a_z;
    x += x0 + z * x_z;
    out += out0 + part * out_z;
% if GPU and MATRIX == "rows":
    __local float sums[256];
    const uint item = get_local_id(0);
    const uint lane = item & ${LANES - 1};
    const uint m = get_group_id(0) * ${256 // LANES} + item / ${LANES};
    float sum = 0.0f;
    if (m < M) {
        const size_t row = (size_t)m * lda;
        #pragma unroll 4
        for (uint k = k_first + lane; k < k_last; k += ${LANES}) sum += in_1(a, row + k) * in_1(x, k);
    }
    sums[item] = sum;
    for (uint half_of = ${LANES // 2}; half_of > 0; half_of >>= 1) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_of) sums[item] += sums[item + half_of];
    }
    if (lane == 0 && m < M) {
        float total = sums[item];
        ${finish("z", "m", "0", "m", "total")}
    }
% elif GPU:
    __local float sums[256];
    const uint lane = get_local_id(1);
    const uint item = lane * 32 + get_local_id(0);
    const uint m = get_global_id(0);
    float sum = 0.0f;
    if (m < M) {
        #pragma unroll 4
        for (uint k = k_first + lane; k < k_last; k += 8) sum += in_1(a, (size_t)k * lda + m) * in_1(x, k);
    }
    sums[item] = sum;
    for (uint half_of = 4; half_of > 0; half_of >>= 1) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_of) sums[item] += sums[item + 32 * half_of];
    }
    if (lane == 0 && m < M) {
        float total = sums[item];
        ${finish("z", "m", "0", "m", "total")}
    }
% elif MATRIX == "rows":
    const uint m1 = min((uint)get_global_id(0) * m_per + m_per, M);
    for (uint m = get_global_id(0) * m_per; m < m1; m++) {
        const size_t row = (size_t)m * lda;
% for v in range(4):
        float8 sum${v} = (float8)(0.0f);
% endfor
        uint k = k_first;
        for (; k + 32 <= k_last; k += 32) {
% for v in range(4):
            sum${v} += in_8(a, row + k + ${8 * v}) * in_8(x, k + ${8 * v});
% endfor
        }
        const float8 sums = (sum0 + sum1) + (sum2 + sum3);
        const float4 halves = sums.lo + sums.hi;
        const float2 quarters = halves.lo + halves.hi;
        float total = quarters.x + quarters.y;
        for (; k < k_last; k++) total += in_1(a, row + k) * in_1(x, k);
        ${finish("z", "m", "0", "m", "total")}
    }
% else:
    // Four rows of the matrix at a time onto the sums of up to ${HELD} columns.
    __local float sums[${HELD}] __attribute__((aligned(64)));
    const uint m0 = get_global_id(0) * m_per;
    const uint columns = ${"M == 0 ? 0 : " if GATE else ""}min(m_per, M - m0);
    for (uint j = 0; j < columns; j++) sums[j] = 0.0f;
    uint k = k_first;
    for (; k + 4 <= k_last; k += 4) {
% for e in range(4):
        const float x${e} = in_1(x, k + ${e});
        const size_t row${e} = (size_t)(k + ${e}) * lda + m0;
% endfor
        uint j = 0;
        for (; j + 8 <= columns; j += 8) {
            const float8 sum = (x0 * in_8(a, row0 + j) + x1 * in_8(a, row1 + j)) + (x2 * in_8(a, row2 + j) + x3 * in_8(a, row3 + j));
            vstore8(vload8(0, sums + j) + sum, 0, sums + j);
        }
        for (; j < columns; j++) {
            sums[j] += (x0 * in_1(a, row0 + j) + x1 * in_1(a, row1 + j)) + (x2 * in_1(a, row2 + j) + x3 * in_1(a, row3 + j));
        }
    }
    for (; k < k_last; k++) {
        const float x0 = in_1(x, k);
        for (uint j = 0; j < columns; j++) sums[j] += x0 * in_1(a, (size_t)k * lda + m0 + j);
    }
    for (uint j = 0; j < columns; j++) {
        float total = sums[j];
        const uint m = m0 + j;
        ${finish("z", "m", "0", "m", "total")}
    }
% endif
}

__kernel void sum_parts(const __global float *parts, __global ${stored(OUT_TYPE)} *out,
                        ${epilogue_parameters()}
                        const ulong out0, const uint M, const uint N, const ulong per, const uint splits) {
    const ulong size = ${"gate[2] == 0 ? 0 : " if GATE else ""}(ulong)M * N;
    const uint z = get_global_id(1);
    const ulong last = min(get_global_id(0) * per + per, size);
    for (ulong at = get_global_id(0) * per; at < last; at++) {
        const uint m = (uint)(at / N);
        const uint n = (uint)(at - (ulong)m * N);
        float sum = 0.0f;
        for (uint s = 0; s < splits; s++) sum += parts[((ulong)z * splits + s) * size + at];
        ${finish("z", "m", "n", "out0 + z * size + at", "sum")}
    }
}
