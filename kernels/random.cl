// Random numbers: element i of a tensor takes its bits from hash(stream, i), never from work-group shape or global state, and every
// step from bits to numbers is exact or rounds in one way, so that all devices give the same bytes. A stream belongs to one operation.
//
// A work-item owns two consecutive elements of a contiguous tensor.
// Launched by memtrain_cl/ops/random.py, whose tests hold the same arithmetic in NumPy.
// Constants: PART (fill, mask, draw: the kernels that are built), T (element type), P (type of probabilities), WG_SIZE
// (items of a group that draws one category together, a power of two; 1 on a CPU).
#pragma OPENCL FP_CONTRACT OFF

<%
VECTOR_WIDTHS = (1,)
%>
#include "_types.cl"
#include "_rng.cl"
#include "_faults.cl"

inline uint bits_at(const uint stream, const ulong i) {
    return hash_u32_1(stream ^ hash_u32_1((uint)i ^ index_salt((uint)(i >> 32))));
}

// [0, 1) in steps of 2^-24.
inline float uniform_at(const uint stream, const ulong i) {
    return uniform_of_1(hash_head_1((uint)i ^ index_salt((uint)(i >> 32))), stream ^ stream >> 16);
}

// (0, 1): the odd multiples of 2^-24.
inline float open_uniform_at(const uint stream, const ulong i) {
    return (float)(int)((bits_at(stream, i) & 0xffffffu) | 1u) * 5.9604644775390625e-8f;
}

// ln(u) of a normal number u: u = 2^e * f with f from sqrt(1/2) to sqrt(2), and ln f = 2*artanh((f-1)/(f+1)) as a series.
inline float portable_log(const float u) {
    const uint bits = as_uint(u) - 0x3f3504f3u;
    const float e = (float)((int)bits >> 23);
    const float f = as_float((bits & 0x7fffffu) + 0x3f3504f3u);
    const float s = (f - 1.0f) / (f + 1.0f);
    const float z = s * s;
    float series = 0.22222222f;
    series = series * z + 0.28571430f;
    series = series * z + 0.40000001f;
    series = series * z + 0.66666669f;
    series = series * z + 2.0f;
    // ln 2 in two parts: e times the first is exact.
    return e * 0.693359375f + (s * series + e * -2.12194440e-4f);
}

// (cos, sin) of 2*pi*v for v in [0, 1): v lies within 1/8 of a quarter turn, and the series see that angle.
inline float2 portable_cos_sin(const float v) {
    const float quarters = v * 4.0f;
    const int q = (int)(quarters + 0.5f);
    const float x = (quarters - (float)q) * 1.57079637f;
    const float z = x * x;
    float c = 2.4801588e-5f;
    c = c * z + -1.3888889e-3f;
    c = c * z + 4.1666668e-2f;
    c = c * z + -0.5f;
    c = c * z + 1.0f;
    float s = 2.7557319e-6f;
    s = s * z + -1.9841270e-4f;
    s = s * z + 8.3333338e-3f;
    s = s * z + -1.6666667e-1f;
    s = s * z + 1.0f;
    s = s * x;
    const float c_turned = q & 1 ? s : c;
    const float s_turned = q & 1 ? c : s;
    return (float2)((q + 1) & 2 ? -c_turned : c_turned, q & 2 ? -s_turned : s_turned);
}

% if PART == "fill":
<%def name="pairs()">
    const ulong first = 2 * (ulong)get_global_id(0);
    for (uint u = 0; u < 2; u++) {
        const ulong i = first + u;
        if (i < n) {
            ${caller.body()}
        }
    }
</%def>

// from + (to - from)*u; where that rounds to `to` or beyond, from.
__kernel void uniform_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float from,
                           const float to) {
    <%self:pairs>
        ${store(T, "out", "out0 + i", "uniform_at(stream, i) * (to - from) + from")};
        if (${load(T, "out", "out0 + i")} >= to) ${store(T, "out", "out0 + i", "from")};
    </%self:pairs>
}

// mean + std*z: Box and Muller's pair of normal numbers from two uniform ones.
__kernel void normal_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float mean,
                          const float std) {
    const ulong i = 2 * (ulong)get_global_id(0);
    if (i >= n) return;
    const float radius = sqrt(-2.0f * portable_log(open_uniform_at(stream, i)));
    const float2 pair = portable_cos_sin(uniform_at(stream, i + 1));
    ${store(T, "out", "out0 + i", "radius * pair.x * std + mean")};
    if (i + 1 < n) ${store(T, "out", "out0 + i + 1", "radius * pair.y * std + mean")};
}

// -ln(u)/rate, never 0.
__kernel void exponential_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float rate) {
    <%self:pairs>
        ${store(T, "out", "out0 + i", "-portable_log(open_uniform_at(stream, i)) / rate")};
    </%self:pairs>
}

// 1 with probability p, else 0.
__kernel void bernoulli_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float p) {
    <%self:pairs>
        ${store(T, "out", "out0 + i", f"({compute(T)})(uniform_at(stream, i) < p)")};
    </%self:pairs>
}

// from + floor(range*b/2^64) of 64 random bits b; range 0 stands for 2^64.
__kernel void integer_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const uint stream_low,
                           const long from, const ulong range) {
    <%self:pairs>
        const ulong bits = (ulong)bits_at(stream, i) << 32 | bits_at(stream_low, i);
        ${store(T, "out", "out0 + i", f"({compute(T)})(from + (long)(range ? mul_hi(bits, range) : bits))")};
    </%self:pairs>
}

// The 32 bits themselves. As long as n <= 2^32 no two elements are equal.
__kernel void hash_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream) {
    <%self:pairs>
        ${store(T, "out", "out0 + i", f"({compute(T)})bits_at(stream, i)")};
    </%self:pairs>
}
% elif PART == "mask":
// out = mask ? x*scale : 0 with mask 1 where u < keep.
__kernel void dropout(const __global ${stored(T)} *x, const ulong x0, __global ${stored(T)} *out, const ulong out0,
                      __global uchar *mask, const ulong mask0, const ulong n, const uint stream, const float keep, const float scale) {
    const ulong first = 2 * (ulong)get_global_id(0);
    for (uint u = 0; u < 2; u++) {
        const ulong i = first + u;
        if (i < n) {
            const uchar kept = uniform_at(stream, i) < keep;
            mask[mask0 + i] = kept;
            ${store(T, "out", "out0 + i", "kept ? " + load(T, "x", "x0 + i") + " * scale : 0.0f")};
        }
    }
}

// grad_x = mask ? grad*scale : 0.
__kernel void dropout_backward(const __global ${stored(T)} *grad, const ulong grad0, const __global uchar *mask, const ulong mask0,
                               __global ${stored(T)} *out, const ulong out0, const ulong n, const float scale) {
    const ulong first = 2 * (ulong)get_global_id(0);
    for (uint u = 0; u < 2; u++) {
        const ulong i = first + u;
        if (i < n) ${store(T, "out", "out0 + i", "mask[mask0 + i] ? " + load(T, "grad", "grad0 + i") + " * scale : 0.0f")};
    }
}

// 1 with probability p[i], else 0.
__kernel void bernoulli_each(const __global ${stored(P)} *p, const ulong p0, __global ${stored(T)} *out, const ulong out0,
                             const ulong n, const uint stream) {
    const ulong i = get_global_id(0);
    if (i < n) ${store(T, "out", "out0 + i", f"({compute(T)})(uniform_at(stream, i) < {load(P, 'p', 'p0 + i')})")};
}
% elif PART == "draw":
// Reports rows with an element of p [rows, columns] that is negative, infinite or no number, or with `positive` 0.
__kernel void require_weights(const __global ${stored(P)} *p, const ulong p0, volatile __global long *faults, const uint columns,
                              const int positive) {
    const size_t i = get_global_id(0);
    const float weight = ${load(P, "p", "p0 + i")};
    if (!(weight >= 0.0f && weight <= 3.4028235e38f)) report(faults, ${FAULT_PROBABILITY}, (long)(i / columns), 0);
    else if (positive && weight == 0.0f) report(faults, ${FAULT_EMPTY}, (long)(i / columns), 0);
}

// out[r, s] = the category j of row r with the largest p[r, j]/q, q exponential: j with probability p[r, j] over the row's sum.
// p [rows, columns], out int64 [rows, draws]; the first of equals counts. A work-group owns a draw.
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void draw(const __global ${stored(P)} *p, const ulong p0, __global long *out, const ulong out0, volatile __global long *faults,
          const uint draws, const uint columns, const uint stream) {
    const size_t d = get_group_id(0);
    const size_t r = d / draws;
    const uint lid = get_local_id(0);
    float best = 0.0f;
    uint best_at = 0xffffffffu;
    for (uint j = lid; j < columns; j += ${WG_SIZE}) {
        const float weight = ${load(P, "p", "p0 + r * columns + j")};
        if (!(weight >= 0.0f && weight <= 3.4028235e38f)) report(faults, ${FAULT_PROBABILITY}, (long)r, 0);
        const float ratio = weight / -portable_log(open_uniform_at(stream, d * columns + j));
        if (ratio > best) {
            best = ratio;
            best_at = j;
        }
    }
% if WG_SIZE > 1:
    __local float ratios[${WG_SIZE}];
    __local uint places[${WG_SIZE}];
    ratios[lid] = best;
    places[lid] = best_at;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint half_size = ${WG_SIZE // 2}; half_size > 0; half_size /= 2) {
        if (lid < half_size) {
            const float other = ratios[lid + half_size];
            const uint place = places[lid + half_size];
            if (other > ratios[lid] || (other == ratios[lid] && place < places[lid])) {
                ratios[lid] = other;
                places[lid] = place;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    best_at = places[0];
% endif
    if (lid == 0) {
        if (best_at == 0xffffffffu) report(faults, ${FAULT_EMPTY}, (long)r, 0);
        out[out0 + d] = best_at == 0xffffffffu ? 0 : (long)best_at;
    }
}
% endif
