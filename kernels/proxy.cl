// The row moments of rms_mode "proxy": sums of squares of a layer's grad_out and input, in the one summation order.
//
//   lanes [1024]: lane l sums the squares of x[l], x[l + 1024], ...                                       square_lanes
//   g_sq [out] = S over tokens m of grad_out[m, o]^2, times (S over lanes) / count                        proxy_moments
//
// The order is that of _reduce.cl, each lane on its own: so few lanes run far, and what shortens the way is reading ahead.
// GPU: a group of WG_SIZE items owns 8 lanes of x; it copies WG_SIZE rows of them into local memory at a time, and 8 items sum.
// Of grad_out it owns WG_SIZE/32 columns, 32 items each: item r of a column holds lanes r, r + 32, ..., which the tree joins first.
// CPU: a work-item owns LANES lanes of x, or `per` blocks of eight columns of grad_out.
// The gate (int64 [4], a layer's clock) ends both at once where `gated` and gate[2], whether the step fires, is 0.
//
// Launched by memtrain_cl/ops/proxy.py. Constants: GPU; WG_SIZE (GPU, 64 .. 256) or LANES (CPU, 8 .. 1024).
#pragma OPENCL FP_CONTRACT OFF

#include "_reduce.cl"

% if GPU:
<%
COLUMNS = WG_SIZE // 32
TURNS = 32
%>
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void square_lanes(const __global float *x, __global float *lanes, const __global long *gate, const uint gated, const ulong size) {
    __local float rows[${8 * WG_SIZE}];
    // Nothing of no elements. (A return before barriers is more than some compilers can do.)
    const ulong count = gated && gate[2] == 0 ? 0 : size;
    const uint lid = get_local_id(0);
    const uint lane = get_group_id(0) * 8 + lid % 8;
    float sum = 0.0f;
    for (ulong base = 0; base < count; base += ${1024 * WG_SIZE}ul) {
        // Eight rows an item, so that their loads are in flight together.
        float own[8];
        #pragma unroll
        for (uint i = 0; i < 8; i++) {
            const ulong at = base + 1024ul * (lid / 8 + ${WG_SIZE // 8} * i) + lane;
            own[i] = at < count ? x[at] : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint i = 0; i < 8; i++) rows[lid + ${WG_SIZE} * i] = own[i];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < 8) {
            // Zeros beyond the end change no sum. Turns by the dozen: loops of some drivers are short.
            for (uint row = 0; row < ${WG_SIZE}; row += ${TURNS}) {
% for i in range(TURNS):
                {
                    const float value = rows[8 * (row + ${i}) + lid];
                    sum += value * value;
                }
% endfor
            }
        }
    }
    if (lid < 8) lanes[lane] = sum;
}

__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void proxy_moments(const __global float *grad_out, const __global float *lanes, __global float *g_sq, const __global long *gate,
                   const uint gated, const float count, const uint columns, const uint tokens, const uint per) {
    __local float sums[${WG_SIZE}];
    __local float input[${WG_SIZE}];
    const uint out = gated && gate[2] == 0 ? 0 : columns;
    const uint lid = get_local_id(0);
    const uint r = lid / ${COLUMNS};
    const uint column = get_group_id(0) * ${COLUMNS} + lid % ${COLUMNS};
    float own[32];
    #pragma unroll
    for (uint i = 0; i < 32; i++) own[i] = 0.0f;
    if (column < out) {
        for (uint base = 0; base < tokens; base += 1024) {
            #pragma unroll
            for (uint i = 0; i < 32; i++) {
                const uint m = base + 32 * i + r;
                const float value = m < tokens ? grad_out[(size_t)m * out + column] : 0.0f;
                own[i] += value * value;
            }
        }
    }
    sums[lid] = ${halving_tree([f"own[{i}]" for i in range(32)])};
    input[lid] = ${halving_tree([f"lanes[lid + {WG_SIZE * k}]" for k in range(1024 // WG_SIZE)])};
    for (uint width = ${WG_SIZE // 2}; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) {
            input[lid] += input[lid + width];
            // Item r of a column lies r * ${COLUMNS} items on: sixteen, eight ... one of them apart.
            if (width >= ${COLUMNS}) sums[lid] += sums[lid + width];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (r == 0 && column < out) {
        const float mean = input[0] / count;
        g_sq[column] = sums[lid] * mean;
    }
}
% else:
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void square_lanes(const __global float *x, __global float *lanes, const __global long *gate, const uint gated, const ulong size) {
    const ulong count = gated && gate[2] == 0 ? 0 : size;
    const uint first = get_global_id(0) * ${LANES};
    float8 sums[${LANES // 8}];
    for (uint i = 0; i < ${LANES // 8}; i++) sums[i] = (float8)(0.0f);
    for (ulong base = first; base < count; base += 1024) {
        const uint left = (uint)min(count - base, ${LANES}ul);
        uint i = 0;
        for (; 8 * i + 8 <= left; i++) {
            const float8 value = vload8(i, x + base);
            sums[i] += value * value;
        }
        for (uint j = 8 * i; j < left; j++) {
            const float value = x[base + j];
            ((float *)&sums[i])[j % 8] += value * value;
        }
    }
    for (uint i = 0; i < ${LANES // 8}; i++) vstore8(sums[i], i, lanes + first);
}

// Columns column .. column + 8 of a row, zeros beyond the row's end.
inline float8 load_columns(const __global float *row, const uint column, const uint out) {
    if (column + 8 <= out) return vload8(0, row + column);
    float own[8];
    for (uint i = 0; i < 8; i++) own[i] = column + i < out ? row[column + i] : 0.0f;
    return vload8(0, own);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void proxy_moments(const __global float *grad_out, const __global float *lanes, __global float *g_sq, const __global long *gate,
                   const uint gated, const float count, const uint columns, const uint tokens, const uint per) {
    const uint out = gated && gate[2] == 0 ? 0 : columns;
    float8 sums[1024];
    for (uint i = 0; i < 128; i++) sums[i] = vload8(i, lanes);
    for (uint width = 64; width > 0; width /= 2) {
        for (uint i = 0; i < width; i++) sums[i] += sums[i + width];
    }
    const float mean = halve_8(sums[0]) / count;
    uint used = 1;
    while (used < min(tokens, 1024u)) used *= 2;
    for (uint block = 0; block < per; block++) {
        const uint column = (get_global_id(0) * per + block) * 8;
        if (column >= out) return;
        for (uint i = 0; i < used; i++) sums[i] = (float8)(0.0f);
        for (uint base = 0; base < tokens; base += 1024) {
            const uint rows = min(tokens - base, 1024u);
            for (uint i = 0; i < rows; i++) {
                const float8 value = load_columns(grad_out + (size_t)(base + i) * out, column, out);
                sums[i] += value * value;
            }
        }
        for (uint width = used / 2; width > 0; width /= 2) {
            for (uint i = 0; i < width; i++) sums[i] += sums[i + width];
        }
        float own[8];
        vstore8(sums[0] * mean, 0, own);
        for (uint i = 0; i < 8 && column + i < out; i++) g_sq[column + i] = own[i];
    }
}
% endif
