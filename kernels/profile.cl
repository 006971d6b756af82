// Profiles of blocks: ranks of a byte, a mean and a scale a block, and the way back. memtrain_cl/reference/profile.py states the rule.
//
// x [n] of float32, float16 or bfloat16, in blocks of `block` (1 to 256) elements; codes uchar [n]; pairs float2 [blocks], (mean, scale);
// table float [256], quantiles by code.
//   encode_profile        codes and pairs of x
//   decode_profile        y [n] float32 of codes, pairs and table
//   standardize_profile   z [n] float32: (x - mean) / scale, NaN for zeros and in blocks whose scale is 0 or NaN
//   profile_errors        errors [blocks, 3]: the sums of (decoded - x)^2 and of x^2, over 4^e, and 2^e, of the block's largest magnitude
//   profile_distances     parts [items]: the largest distance between the steps of sorted z [n], NaN behind all others, and the curve
//                         that a table of it gives by linear interpolation; found[0]: how many of z are numbers
// A work-group of a GPU takes SLOTS blocks, LANES work-items each; a work-item of a CPU takes `per` blocks. profile_distances is flat.
// Launched by memtrain_cl/ops/profile.py. Constants: NAME (the one kernel to render), X (elements of x) and those of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
PROFILE_KERNEL = NAME
TYPES = (X, "float32")
SOURCE = f"const __global {'half' if X == 'float16' else 'ushort' if X == 'bfloat16' else 'float'} *x, const ulong x0"
PAIRS = "__global float2 *pairs"
TABLE = "const __global float *table, const uint positive"
ARGUMENTS = {
    "encode_profile": f"{SOURCE}, __global uchar *codes, {PAIRS}",
    "decode_profile": f"const __global uchar *codes, const {PAIRS}, {TABLE}, __global float *y",
    "standardize_profile": f"{SOURCE}, const {PAIRS}, __global float *z",
    "profile_errors": f"{SOURCE}, const __global uchar *codes, const {PAIRS}, {TABLE}, __global float *errors",
    "profile_distances": "",
}[NAME]
ENCODES, DECODES = NAME == "encode_profile", NAME in ("decode_profile", "profile_errors")
SCORES = NAME == "profile_errors"
%>
#include "_types.cl"
#include "_reduce.cl"
#include "_rows.cl"
#include "_profile.cl"

% if NAME == "profile_distances":
// The item's elements are first, first + step ... below n, `count` of them at most.
__kernel void profile_distances(const __global float *z, const __global float *curve, __global float *parts, __global long *found,
                                const ulong n, const uint cells, const float start, const float cells_a_unit, const ulong apart,
                                const ulong step, const ulong count) {
    // Numbers come before what is none.
    ulong low = 0;
    ulong high = n;
    while (low < high) {
        const ulong middle = (low + high) / 2;
        if (isnan(z[middle])) high = middle;
        else low = middle + 1;
    }
    const float all = (float)max(low, (ulong)1);
    const ulong item = get_global_id(0);
    float most = 0.0f;
    for (ulong k = 0; k < count; k++) {
        const ulong i = item * apart + k * step;
        if (i >= low) break;
        const float place = min(max((z[i] - start) * cells_a_unit, 0.0f), (float)cells);
        const uint cell = min((uint)place, cells - 1);
        const float height = curve[cell] + (curve[cell + 1] - curve[cell]) * (place - (float)cell);
        most = max(most, max((float)(i + 1) / all - height, height - (float)i / all));
    }
    parts[item] = most;
    if (item == 0) found[0] = (long)low;
}
% else:
inline uchar${WIDTH} take_bytes(const __global uchar *p, uint left) {
% if ALIGNED:
    return *(const __global uchar4 *)p;
% else:
    if (left >= ${WIDTH}) return vload${WIDTH}(0, p);
    uchar own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) own[i] = i < left ? p[i] : 0;
    return vload${WIDTH}(0, own);
% endif
}

inline void put_bytes(__global uchar *p, uint left, const uchar${WIDTH} bytes) {
% if ALIGNED:
    *(__global uchar4 *)p = bytes;
% else:
    if (left >= ${WIDTH}) {
        vstore${WIDTH}(bytes, 0, p);
        return;
    }
    uchar own[${WIDTH}];
    vstore${WIDTH}(bytes, 0, own);
    for (uint i = 0; i < left; i++) p[i] = own[i];
% endif
}

inline vec standardized(vec v, float2 pair) {
    const vec z = (v - pair.x) / pair.y;
    const int${WIDTH} there = (as_uint${WIDTH}(v) & 0x7fffffffu) > 0x007fffffu;
    return select((vec)(NAN), z, there & (int${WIDTH})(pair.y > 0.0f ? -1 : 0));
}

<%def name="block_begins()">
        const ulong begin = number * block;
        const uint size = (uint)min((ulong)block, n - begin);
% if not ENCODES:
        const float2 pair = pairs[number];
% endif
% if DECODES:
        const float least = profile_least(pair, positive);
% endif
</%def>
<%
LEFT = "left" if GPU else "size - j"
VALUES = f"load_left_{X}(x + x0 + begin + j, {LEFT}, 0.0f)"
DECODED = f"profile_decode_{WIDTH}(take_bytes(codes + begin + j, {LEFT}), pair, least, table)"
%>
% if GPU:
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void ${PROFILE_KERNEL}(${ARGUMENTS}, const ulong n, const uint block, const ulong blocks, const ulong per) {
    const uint lane = get_local_id(0) % ${LANES};
    const uint slot = get_local_id(0) / ${LANES};
    // For the sake of the barriers no work-item leaves before them.
    const ulong own_number = get_group_id(0) * (ulong)${SLOTS} + slot;
    const bool within = own_number < blocks;
    const ulong number = within ? own_number : 0;
    ${block_begins()}
    const uint j = 4 * lane;
    const uint left = within && j < size ? size - j : 0;
% if ENCODES or SCORES:
    __local uint4 scratch[${SLOTS} * PROFILE_SCRATCH];
    __local uint4 *own = scratch + slot * PROFILE_SCRATCH;
    vec v = (vec)(0.0f);
    if (left) v = ${VALUES};
% endif
% if ENCODES:
    uchar4 bytes;
    const float2 pair = profile_encode(v, lane, (size + 3) / 4, own, &bytes);
    if (left) put_bytes(codes + begin + j, left, bytes);
    if (lane == 0 && within) pairs[number] = pair;
% elif SCORES:
    vec back = (vec)(0.0f);
    if (left) back = ${DECODED};
    const uint4 bounds = profile_bounds(profile_keys(v), own, lane);
    const float power = bounds.z ? profile_power(profile_value(bounds.x), profile_value(bounds.y)) : 1.0f;
    const float inverse = 1.0f / power;
    const vec near = v * inverse;
    const vec apart = back * inverse - near;
    const float error = profile_sum(apart * apart, (__local float4 *)own, lane);
    const float whole = profile_sum(near * near, (__local float4 *)own, lane);
    if (lane == 0 && within) {
        errors[3 * number] = error;
        errors[3 * number + 1] = whole;
        errors[3 * number + 2] = power;
    }
% elif NAME == "decode_profile":
    if (left) store_left_float32(y + begin + j, left, ${DECODED});
% else:
    if (left) store_left_float32(z + begin + j, left, standardized(${VALUES}, pair));
% endif
}
% else:
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void ${PROFILE_KERNEL}(${ARGUMENTS}, const ulong n, const uint block, const ulong blocks, const ulong per) {
    const ulong first = get_global_id(0) * per;
    const ulong last = min(first + per, blocks);
    for (ulong number = first; number < last; number++) {
        ${block_begins()}
% if ENCODES:
        float held[256];
        uchar bytes[256];
        for (uint j = 0; j < 256; j += 8) {
            vec v = (vec)(0.0f);
            if (j < size) v = ${VALUES};
            vstore8(v, 0, held + j);
        }
        pairs[number] = profile_encode(held, size, bytes);
        for (uint j = 0; j < size; j += 8) put_bytes(codes + begin + j, size - j, vload8(0, bytes + j));
% elif SCORES:
        float held[256];
        float own[256];
        vec most = (vec)(0.0f);
        for (uint j = 0; j < 256; j += 8) {
            vec v = (vec)(0.0f);
            vec back = (vec)(0.0f);
            if (j < size) {
                v = ${VALUES};
                back = ${DECODED};
            }
            most = max(most, fabs(v));
            vstore8(v, 0, own + j);
            vstore8(back, 0, held + j);
        }
        const float largest = vec_max(most);
        const float power = largest < 0x1p-126f ? 1.0f : profile_power(largest, largest);
        const float inverse = 1.0f / power;
        for (uint j = 0; j < 256; j += 8) {
            const vec near = vload8(0, own + j) * inverse;
            const vec apart = vload8(0, held + j) * inverse - near;
            vstore8(near * near, 0, own + j);
            vstore8(apart * apart, 0, held + j);
        }
        errors[3 * number] = profile_sum(held);
        errors[3 * number + 1] = profile_sum(own);
        errors[3 * number + 2] = power;
% else:
        for (uint j = 0; j < size; j += 8) {
% if NAME == "decode_profile":
            store_left_float32(y + begin + j, size - j, ${DECODED});
% else:
            store_left_float32(z + begin + j, size - j, standardized(${VALUES}, pair));
% endif
        }
% endif
    }
}
% endif
% endif
