// Counter codes between their storages: pack, unpack, decode to a dense weight or to ternary weights in float16.
//
// Launched by memtrain_cl/ops/counter.py and cache.py. Constants: GPU; WORDS (pack and unpack: whole multiples of sixteen codes on 16-byte borders,
// on a GPU); C and PACKED, read by decode_dense and decode_half.
#pragma OPENCL FP_CONTRACT OFF

<% VECTOR_WIDTHS = (4,) %>
#include "_code6.cl"
#include "_counter_state.cl"

// codes uchar [4*groups] -> packed uchar [3*groups]; a work-item owns `per` groups in a row.
__kernel void pack_codes(const __global uchar *codes, __global uchar *packed, const ulong groups, const ulong per) {
% if WORDS:
    // Sixteen codes an item, in whole words on both sides.
    const ulong i = get_global_id(0);
    if (4 * i >= groups) return;
    const uint4 words = ((const __global uint4 *)codes)[i];
    const uint4 group = (words & 0x3fu) | (words >> 2 & 0xfc0u) | (words >> 4 & 0x3f000u) | (words >> 6 & 0xfc0000u);
    __global uint *target = (__global uint *)packed + 3 * i;
    target[0] = group.x | group.y << 24;
    target[1] = group.y >> 8 | group.z << 16;
    target[2] = group.z >> 16 | group.w << 8;
% else:
    const ulong first = get_global_id(0) * per;
    const ulong last = min(first + per, groups);
    ulong q = first;
% if not GPU:
    for (; q + 2 <= last; q += 2) cc_store_8(packed + 3 * q, convert_uint8(vload8(0, codes + 4 * q)) & 63u);
% endif
    for (; q < last; q++) cc_store_group(packed + 3 * q, cc_pack4(convert_uint4(vload4(q, codes)) & 63u));
% endif
}

// packed uchar [3*groups] -> codes uchar [4*groups]; a work-item owns `per` groups in a row.
__kernel void unpack_codes(const __global uchar *packed, __global uchar *codes, const ulong groups, const ulong per) {
% if WORDS:
    const ulong i = get_global_id(0);
    if (4 * i >= groups) return;
    const __global uint *source = (const __global uint *)packed + 3 * i;
    const uint a = source[0];
    const uint b = source[1];
    const uint c = source[2];
    // By 64-bit shifts: of a >> 24 | b << 8 compilers make a funnel shift, which Oclgrind does not know.
    const uint4 group = (uint4)(a, (uint)(upsample(b, a) >> 24), (uint)(upsample(c, b) >> 16), c >> 8);
    ((__global uint4 *)codes)[i] =
        (group & 0x3fu) | (group << 2 & 0x3f00u) | (group << 4 & 0x3f0000u) | (group << 6 & 0x3f000000u);
% else:
    const ulong first = get_global_id(0) * per;
    const ulong last = min(first + per, groups);
    ulong q = first;
% if not GPU:
    for (; q + 2 <= last; q += 2) vstore8(convert_uchar8(cc_load_8(packed + 3 * q)), 0, codes + 4 * q);
% endif
    for (; q < last; q++) vstore4(convert_uchar4(cc_unpack4(cc_load_group(packed + 3 * q))), q, codes);
% endif
}

// dense float32 [rows, n] = scale[row] * t; a work-item owns `per` groups of four of a row. Items lie row after row:
// a second dimension would hold no more than 65535 rows on some drivers.
__kernel void decode_dense(const __global uchar *state, const __global float *scale, __global float *dense, const uint n, const uint per) {
    const uint groups = (n + 3) / 4;
    const uint items = (groups + per - 1) / per;
    const size_t o = get_global_id(0) / items;
    const uint first = (uint)(get_global_id(0) - o * items) * per;
    const uint last = min(first + per, groups);
    const float s = scale[o];
    const __global uchar *row = state + o * (${ROW_BYTES[PACKED]});
    __global float *target = dense + o * (size_t)n;
    for (uint q = first; q < last; q++) {
        const float4 w = s * code_ternary_4(word_centred(load_word_4(row, q, n)));
        const uint j = 4 * q;
        if (j + 4 <= n) {
            vstore4(w, q, target);
        } else {
            target[j] = w.x;
            if (j + 1 < n) target[j + 1] = w.y;
            if (j + 2 < n) target[j + 2] = w.z;
        }
    }
}

// t float16 [rows, n]; items as above.
__kernel void decode_half(const __global uchar *state, __global half *t, const uint n, const uint per) {
    const uint groups = (n + 3) / 4;
    const uint items = (groups + per - 1) / per;
    const size_t o = get_global_id(0) / items;
    const uint first = (uint)(get_global_id(0) - o * items) * per;
    const uint last = min(first + per, groups);
    const __global uchar *row = state + o * (${ROW_BYTES[PACKED]});
    __global half *target = t + o * (size_t)n;
    for (uint q = first; q < last; q++) {
        const float4 four = code_ternary_4(word_centred(load_word_4(row, q, n)));
        const uint j = 4 * q;
        if (j + 4 <= n) {
            vstore_half4_rte(four, q, target);
        } else {
            vstore_half_rte(four.x, j, target);
            if (j + 1 < n) vstore_half_rte(four.y, j + 1, target);
            if (j + 2 < n) vstore_half_rte(four.z, j + 2, target);
        }
    }
}
