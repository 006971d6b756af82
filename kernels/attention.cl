// Scaled dot product attention that never stores [T, S]: an online softmax forward, probabilities recomputed backward.
//
//   s[i, j]   = scale * sum_d q[i, d] k[j, d] + mask[i, j]     (-infinity where a bool mask or causality, j > i, forbids)
//   p[i, j]   = exp(s[i, j] - lse[i]),  lse[i] = log sum_j exp(s[i, j])
//   w[i, j]   = p[i, j] * dropped[i, j]                        dropped: 1/(1 - dropout_p) where a hash keeps i, j, else 0
//   out[i]    = sum_j w[i, j] v[j]
//   delta[i]  = sum_c grad_out[i, c] out[i, c]
//   ds[i, j]  = p[i, j] * (dropped[i, j] * sum_c grad_out[i, c] v[j, c] - delta[i])
//   grad_q[i] = scale * sum_j ds[i, j] k[j]
//   grad_k[j] = scale * sum_i ds[i, j] q[i]
//   grad_v[j] = sum_i w[i, j] grad_out[i]
//
// q [B, H, T, D], k [B, H/share, S, D], v [B, H/share, S, V]; a row's elements are neighbours, all else is strided: a
// place (x, y, z, w) is first element, stride of B, of H, of rows. mask [B, H, T, S] by place and the stride of S, 0
// where it broadcasts. lse and delta: contiguous [B, H, T] of float. lse is +infinity where a row may see nothing: its p
// are then 0 in backward too, and its output is 0, as torch's safe softmax makes it. Exponents are taken in base 2:
// scores are kept times log2(e), and scale2 = scale * log2(e). sizes: (T, S, D, V, H, share, causal, 0).
//
// A block of rows stays (queries forward and for grad_q, keys for grad_k and grad_v) and the blocks of the other side
// pass by: blocks that stay share nothing, so every sum has one order. Launched by memtrain_cl/launchers/attention.py.
// Constants: KERNEL (which one is rendered), GPU, TYPE, MASK (an element type, or ""), DROPOUT. Of the GPU shape: SLICE
// (columns of the result that a group makes), DEPTH (columns or rows in local memory), ALIGNED (rows begin on four
// elements). Of the CPU shape: HEAD (elements of a private row), ROWS (of the side that passes, at a time), WIDE (the
// vectors of products).
<%
VECTOR_WIDTHS = (1,)
FORWARD_ARGS = ("q", "k", "v")
LOG2E = "1.44269504088896341f"
%>
#include "_types.cl"
#include "_rng.cl"

inline size_t place_of(const ulong4 place, const uint b, const uint h) { return place.x + place.y * b + place.z * h; }

// What w is of p at element `index` of [B, H, T, S]; threshold is dropout_p * 2^24, kept is 1/(1 - dropout_p).
inline float dropped(const ulong index, const uint seed, const uint threshold, const float kept) {
    const uint high = (uint)(index >> 32);
    const uint salt = high ? index_salt(high) : 0u;
    return (hash_u32_1(seed ^ hash_u32_1((uint)index ^ salt)) & 0xffffffu) >= threshold ? kept : 0.0f;
}

% if MASK:
// What the mask adds to a score in units of log2.
inline float mask_term(const __global ${stored(MASK)} *mask, const size_t at) {
% if MASK == "bool":
    return mask[at] ? 0.0f : -INFINITY;
% else:
    return ${load(MASK, "mask", "at")} * ${LOG2E};
% endif
}
% endif

<%def name="input_arguments()">
    const __global ${stored(TYPE)} *q, const ulong4 q_place, const __global ${stored(TYPE)} *k, const ulong4 k_place,
    const __global ${stored(TYPE)} *v, const ulong4 v_place,
% if MASK:
    const __global ${stored(MASK)} *mask, const ulong4 mask_place, const ulong mask_stride,
% endif
</%def>
<%def name="backward_arguments()">
    ${input_arguments()}
    const __global ${stored(TYPE)} *grad_out, const ulong4 grad_out_place, const __global float *lse,
    const __global float *delta,
</%def>
<%def name="dropout_arguments()">
% if DROPOUT:
    , const uint seed, const uint threshold, const float kept
% endif
</%def>

% if KERNEL == "delta":
// An item a row of [B, H, T].
__kernel void attention_delta(const __global ${stored(TYPE)} *grad_out, const ulong4 grad_out_place,
                              const __global ${stored(TYPE)} *out, const ulong4 out_place, __global float *delta,
                              const uint8 sizes) {
    const size_t row = get_global_id(0);
    const uint T = sizes.s0, H = sizes.s4;
    const size_t bh = row / T;
    const uint t = (uint)(row - bh * T);
    const uint b = (uint)(bh / H);
    const uint h = (uint)(bh - (size_t)b * H);
    grad_out += place_of(grad_out_place, b, h) + grad_out_place.w * t;
    out += place_of(out_place, b, h) + out_place.w * t;
    float sum = 0.0f;
    for (uint c = 0; c < sizes.s3; c++) sum += ${load(TYPE, "grad_out", "c")} * ${load(TYPE, "out", "c")};
    delta[row] = sum;
}
% elif KERNEL == "dropout":
// dropped as a tensor, [B, H, T, S] flat: for the gradients of gradients, which are composed of stored probabilities.
__kernel void attention_dropout(__global float *out, const ulong out0, const ulong count, const ulong per,
                                const uint seed, const uint threshold, const float kept) {
    const ulong begin = get_global_id(0) * per;
    const ulong end = min(begin + per, count);
    for (ulong i = begin; i < end; i++) out[out0 + i] = dropped(i, seed, threshold, kept);
}
% elif GPU:
#include "_attention_gpu.cl"
% else:
#include "_attention_cpu.cl"
% endif
