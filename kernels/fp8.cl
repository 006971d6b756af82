// Casts to the 8-bit floating types of torch, alone or with what a guard asks for, and the way back.
//
// x [n] of float32, float16 or bfloat16, as float32; codes [n] uint8: sign, exponent, mantissa
//
//   rounded to the nearest number of the type, ties to the even code, below its normal numbers too; the sign of zeros stays
//   a magnitude that rounds to beyond the largest number becomes the code `beyond`, every NaN 0x7f
//   counts: the largest bits of |x| as float32, how many are not finite, how many are not zero, how many of those become zero
//
// A number is looked at by its bits, so that no device can take a subnormal for zero. The one sum in float32 rounds the numbers
// that become subnormal: it is of a number whose last place is the type's, and a subnormal x changes nothing in it.
//
//   fp8_cast       a work-item of a GPU takes vectors of 4 that lie the launch's width apart, one of a CPU `per` vectors of 8 that lie together;
//                  COUNTED: each work-group of a GPU, or work-item of a CPU, leaves its own four numbers in `parts`
//   fp8_counts     the counts of all parts: one work-group of a GPU, one work-item of a CPU
//   fp8_restore    numbers from codes, exact in every type
// Launched by memtrain_cl/ops/fp8.py.
// Constants: NAME (the one kernel to render), X (elements of x), MANTISSA and BIAS of the type, COUNTED or not, GPU or not,
// WG_SIZE (items of a GPU's work-group, a power of two), ALIGNED and the rest of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (X,)
WIDTH = 4 if GPU else 8
U = f"uint{WIDTH}"
V = f"float{WIDTH}"
%>
#include "_types.cl"
#include "_rows.cl"

// A float32 number's bits, shifted so, end where the type's do; OFFSET is what its exponent then has too much.
#define SHIFT ${23 - MANTISSA}u
#define OFFSET ${hex((127 - BIAS) << 23)}u
#define LEAST_NORMAL ${hex((128 - BIAS) << 23)}u
#define INFINITE 0x7f800000u
<%def name="begin_vectors()">
    const ulong units = (n + ${WIDTH - 1}) / ${WIDTH};
% if GPU:
    for (ulong unit = get_global_id(0); unit < units; unit += get_global_size(0)) {
% else:
    const ulong first = get_global_id(0) * per;
    const ulong last = min(first + per, units);
    for (ulong unit = first; unit < last; unit++) {
% endif
        const ulong at = ${WIDTH} * unit;
        const uint left = (uint)min(n - at, (ulong)${WIDTH});
</%def>
<%doc>Leaves the largest `sums.x` of a group's items and the totals of the others in `shared`, WG_SIZE apart.</%doc>
<%def name="in_group()">
    const uint lane = get_local_id(0);
    shared[lane] = sums.x;
    shared[${WG_SIZE} + lane] = sums.y;
    shared[${2 * WG_SIZE} + lane] = sums.z;
    shared[${3 * WG_SIZE} + lane] = sums.w;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint width = ${WG_SIZE // 2}; width > 0; width >>= 1) {
        if (lane < width) {
            shared[lane] = max(shared[lane], shared[lane + width]);
            for (uint k = ${WG_SIZE}; k < ${4 * WG_SIZE}; k += ${WG_SIZE}) shared[k + lane] += shared[k + lane + width];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
</%def>
% if NAME == "fp8_cast":
// The codes of numbers of the bits `most`, without a sign.
inline ${U} codes_of(${U} most, uint beyond) {
    // The last place of the number added is that of the type's subnormals.
    const ${U} small = as_${U}(as_${V}(most) + ${2.0 ** (24 - BIAS - MANTISSA)}f) - ${hex((127 + 24 - BIAS - MANTISSA) << 23)}u;
    const ${U} large = (most + ((1u << (SHIFT - 1)) - 1) + ((most >> SHIFT) & 1u) - OFFSET) >> SHIFT;
    // As a vector: Oclgrind reads lanes beyond a single number.
    const ${U} code = min(select(large, small, most < LEAST_NORMAL), (${U})(beyond));
    return select(code, (${U})(0x7fu), most > INFINITE);
}

#include "_bytes.cl"

// The bits of up to WIDTH numbers as float32.
inline ${U} bits_of(const __global ${stored(X)} *p, uint left) {
    const ${U} bits = as_${U}(load_left_${X}(p, left, 0.0f));
% if X != "float16":
    return bits;
% else:
    // Some devices convert every NaN to one: so its sign and its other bits are taken from where they lie.
    if (!any(isnan(as_${V}(bits)))) return bits;
    const __global ushort *raw = (const __global ushort *)p;
    uint own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) own[i] = i < left ? raw[i] : 0;
    const ${U} half_bits = vload${WIDTH}(0, own);
    const ${U} nan = (half_bits & 0x8000u) << 16 | 0x7fc00000u | (half_bits & 0x3ffu) << 13;
    return select(bits, nan, (half_bits & 0x7fffu) > 0x7c00u);
% endif
}

% if COUNTED:
// Through memory for the same reason as vec_sum.
inline uint4 gathered(${U} highest, ${U} wrong, ${U} filled, ${U} lost) {
    uint own[${4 * WIDTH}];
    vstore${WIDTH}(highest, 0, own);
    vstore${WIDTH}(wrong, 1, own);
    vstore${WIDTH}(filled, 2, own);
    vstore${WIDTH}(lost, 3, own);
    uint all[4] = {0, 0, 0, 0};
    for (uint i = 0; i < ${WIDTH}; i++) {
        all[0] = max(all[0], own[i]);
        for (uint k = 1; k < 4; k++) all[k] += own[k * ${WIDTH} + i];
    }
    return vload4(0, all);
}
% endif

__kernel void fp8_cast(const __global ${stored(X)} *x, __global uchar *codes,
% if COUNTED:
                       __global uint *parts,
% endif
                       const ulong n, const ulong per, const uint beyond) {
% if COUNTED:
    ${U} highest = 0, wrong = 0, filled = 0, lost = 0;
% endif
${begin_vectors()}
        const ${U} bits = bits_of(x + at, left);
        const ${U} most = bits & 0x7fffffffu;
        const ${U} code = codes_of(most, beyond);
        put_bytes(codes + at, left, code | (bits >> 24 & 0x80u));
% if COUNTED:
        // A comparison that holds is -1.
        highest = max(highest, most);
        wrong -= as_${U}(most >= INFINITE);
        filled -= as_${U}(most != 0u);
        lost -= as_${U}((most != 0u) & (code == 0u));
% endif
    }
% if COUNTED:
    uint4 sums = gathered(highest, wrong, filled, lost);
% if GPU:
    __local uint shared[${4 * WG_SIZE}];
    ${in_group()}
    if (lane < 4) parts[4 * get_group_id(0) + lane] = shared[lane * ${WG_SIZE}];
% else:
    vstore4(sums, get_global_id(0), parts);
% endif
% endif
}
% elif NAME == "fp8_counts":
__kernel void fp8_counts(const __global uint *parts, __global long *counts, const uint groups) {
    ulong4 sums = 0;
    const uint step = get_local_size(0);
    for (uint g = get_local_id(0); g < groups; g += step) {
        const uint4 own = vload4(g, parts);
        sums = (ulong4)(max(sums.x, (ulong)own.x), sums.y + own.y, sums.z + own.z, sums.w + own.w);
    }
% if GPU:
    __local ulong shared[${4 * WG_SIZE}];
    ${in_group()}
    if (lane < 4) counts[lane] = (long)shared[lane * ${WG_SIZE}];
% else:
    vstore4(convert_long4(sums), 0, counts);
% endif
}
% else:
inline ${U} take_codes(const __global uchar *p, uint left) {
% if GPU and ALIGNED:
    return convert_uint4(*(const __global uchar4 *)p);
% else:
    if (left >= ${WIDTH}) return convert_uint${WIDTH}(vload${WIDTH}(0, p));
    uint own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) own[i] = i < left ? p[i] : 0;
    return vload${WIDTH}(0, own);
% endif
}

__kernel void fp8_restore(const __global uchar *codes, __global ${stored(X)} *y, const ulong n, const ulong per) {
${begin_vectors()}
        const ${U} code = take_codes(codes + at, left);
        const ${U} most = code & 0x7fu;
        const ${U} normal = (most << SHIFT) + OFFSET;
        const ${U} small = as_${U}(convert_${V}(most) * ${2.0 ** (1 - BIAS - MANTISSA)}f);
        ${U} bits = select(normal, small, most < ${1 << MANTISSA}u);
% if MANTISSA == 2:
        bits = select(bits, most << SHIFT | INFINITE, most >= 0x7cu);
        bits |= select((${U})(0), (${U})(0x400000u), most > 0x7cu);
% else:
        bits |= select((${U})(0), (${U})(INFINITE), most == 0x7fu);
% endif
        store_left_${X}(y + at, left, as_${V}(bits | (code & 0x80u) << 24));
    }
}
% endif
