<%doc>
Profiles of one block of up to 256 elements, as memtrain_cl/reference/profile.py states them, for kernels/profile.cl and for kernels
that hold a block at hand. Expects FP_CONTRACT OFF, _reduce.cl and _rows.cl with their constants, of which on GPUs LANES are the
work-items (a power of two, 4 to 64) that share a block, each with the elements 4*lane .. 4*lane + 3 of it.

Values are float32, zeros beyond the block's end; magnitudes below 2^-126 count as zero. The pair is (mean, scale). A block that is not
finite gets (NaN, NaN) and codes 1.

GPUs, all LANES work-items of a block together, which for the sake of the barriers none may leave:
  profile_encode(v, lane, units, own, codes)    the pair, in all of them, and this item's codes in *codes (private). units: the vectors
                                                of four that hold the block. own: PROFILE_SCRATCH uint4 of local memory for the
                                                block; calls may follow each other with the same.
  profile_decode_4(codes, pair, least, table)   float4
CPUs, one work-item:
  profile_encode(x, n, codes)                   the pair. x: private float [256], which is spoilt. codes: private uchar [256]; the first
                                                n, rounded up to eight, are written, 0 beyond n.
  profile_decode_8(codes, pair, least, table)   float8
Both:
  profile_least(pair, positive)                 below which no decoded value lies: mean/16 of positive numbers, else -inf
table: float [256], the standardised quantiles by code; the first stands for nothing.
</%doc>
<%
WIDTH = 4 if GPU else 8
V = f"float{WIDTH}"
U = f"uint{WIDTH}"
%>
// Keys order as numbers do; this one, after all others, stands for zeros.
#define PROFILE_ZERO 0xffffffffu

inline ${U} profile_keys(${V} v) {
    const ${U} bits = as_${U}(v);
    const ${U} key = min(select(bits | 0x80000000u, ~bits, bits > 0x7fffffffu), (${U})(PROFILE_ZERO - 1));
    return select((${U})(PROFILE_ZERO), key, (bits & 0x7fffffffu) > 0x007fffffu);
}

inline float profile_value(uint key) { return as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// Whether the keys from `least` to `most` are those of finite numbers.
inline bool profile_finite(uint least, uint most) { return least > 0x007fffffu && most < 0xff800000u; }

// The power of two in the largest magnitude of numbers from `low` to `high`.
inline float profile_power(float low, float high) { return as_float(as_uint(max(fabs(low), fabs(high))) & 0x7f800000u); }

inline float profile_mean(float sum, float count, float low, float high) { return min(max(sum / count, low), high); }

inline float profile_scale(float sum, float count) { return min(sqrt(sum / count), 0x1.fffffep+0f); }

inline float profile_least(float2 pair, uint positive) { return positive ? pair.x * 0.0625f : -INFINITY; }

inline ${V} profile_decode_${WIDTH}(uchar${WIDTH} codes, float2 pair, float least, const __global float *table) {
    uchar own[${WIDTH}];
    float quantiles[${WIDTH}];
    vstore${WIDTH}(codes, 0, own);
    for (uint i = 0; i < ${WIDTH}; i++) quantiles[i] = table[own[i]];
    const ${V} value = pair.x + pair.y * vload${WIDTH}(0, quantiles);
    // Not max, which may lose a NaN.
    const ${V} bounded = select(value, (${V})(least), value < least);
    return select((${V})(0.0f), bounded, convert_uint${WIDTH}(codes) != 0);
}

% if GPU:
<% STAGE = first_stage(LANES) %>
#define PROFILE_SCRATCH ${2 * LANES + STAGE}

// The sum over the block in the one order, in all of its work-items.
inline float profile_sum(float4 v, __local float4 *own, uint lane) {
    own[lane] = v;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < ${STAGE}) own[${LANES} + lane] = ${halving_tree(f"own[lane + {STAGE * i}]" for i in range(LANES // STAGE))};
    barrier(CLK_LOCAL_MEM_FENCE);
    return halve_4(${halving_tree(f"own[{LANES + i}]" for i in range(STAGE))});
}

// Of two parts of a block (least, largest, number, 0) of both. Through memory, as all vectors that are made of single numbers:
// Oclgrind's check for uninitialised values reports a vector of which a part is not written yet.
inline uint4 profile_joined(uint4 a, uint4 b) {
    uint both[4] = {min(a.x, b.x), max(a.y, b.y), a.z + b.z, 0};
    return vload4(0, both);
}

// (least, largest, number, 0) of the block's keys but those of zeros.
inline uint4 profile_bounds(uint4 key, __local uint4 *own, uint lane) {
    uint least[4], most[4], count[4];
    vstore4(key, 0, least);
    vstore4(select((uint4)(0), key, key != PROFILE_ZERO), 0, most);
    vstore4(select((uint4)(0), (uint4)(1), key != PROFILE_ZERO), 0, count);
    uint bounds[4] = {min(min(least[0], least[1]), min(least[2], least[3])), max(max(most[0], most[1]), max(most[2], most[3])),
                      count[0] + count[1] + count[2] + count[3], 0};
    own[lane] = vload4(0, bounds);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < ${STAGE}) {
        uint4 all = own[lane];
        #pragma unroll
        for (uint i = 1; i < ${LANES // STAGE}; i++) all = profile_joined(all, own[lane + ${STAGE} * i]);
        own[${LANES} + lane] = all;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    uint4 all = own[${LANES}];
    #pragma unroll
    for (uint i = 1; i < ${STAGE}; i++) all = profile_joined(all, own[${LANES} + i]);
    return all;
}

// How many keys of the block come before each of this item's four, by value and place.
inline uint4 profile_ranks(uint4 key, const __local uint4 *keys, uint lane, uint units) {
    uint4 rank = (uint4)(0);
    for (uint unit = 0; unit < units; unit++) {
        const uint4 other = keys[unit];
        // Of the places before, equal keys come before, too.
        const uint4 bound = key + (unit < lane ? 1u : 0u);
        rank -= as_uint4((uint4)(other.x) < bound) + as_uint4((uint4)(other.y) < bound);
        rank -= as_uint4((uint4)(other.z) < bound) + as_uint4((uint4)(other.w) < bound);
    }
    // Its own were compared by value alone.
    uint alike[4] = {0, key.x == key.y, (key.x == key.z) + (key.y == key.z), (key.x == key.w) + (key.y == key.w) + (key.z == key.w)};
    return rank + vload4(0, alike);
}

inline float2 profile_encode(float4 v, uint lane, uint units, __local uint4 *own, uchar4 *codes) {
    __local uint4 *work = own + ${LANES};
    const uint4 key = profile_keys(v);
    const int4 there = key != PROFILE_ZERO;
    own[lane] = key;
    const uint4 bounds = profile_bounds(key, work, lane);
    const uint4 rank = profile_ranks(key, own, lane, units);
    const bool finite = profile_finite(bounds.x, bounds.y);
    const bool some = finite && bounds.z > 0;
    const float low = some ? profile_value(bounds.x) : 1.0f;
    const float high = some ? profile_value(bounds.y) : 1.0f;
    const float count = (float)max(bounds.z, 1u);
    const float power = profile_power(low, high);
    const float inverse = 1.0f / power;
    const float4 near = select((float4)(0.0f), v * inverse, there);
    const float sum = profile_sum(near, (__local float4 *)work, lane);
    const float mean = profile_mean(sum, count, low * inverse, high * inverse);
    const float4 apart = select((float4)(0.0f), near - mean, there);
    const float scale = profile_scale(profile_sum(apart * apart, (__local float4 *)work, lane), count);
    const uint4 code = select((uint4)(0), 1u + convert_uint4((convert_float4(rank) + 0.5f) * 255.0f / count), there);
    *codes = finite ? convert_uchar4(code) : (uchar4)(1);
    const float2 pair = some ? (float2)(mean * power, scale * power) : (float2)(0.0f);
    return finite ? pair : (float2)(NAN);
}
% else:
// The sum over the block in the one order.
inline float profile_sum(const float *x) {
    float sums[128];
    for (uint j = 0; j < 128; j += 8) vstore8(vload8(0, x + j) + vload8(0, x + j + 128), 0, sums + j);
    for (uint left = 64; left >= 8; left /= 2) {
        for (uint j = 0; j < left; j += 8) vstore8(vload8(0, sums + j) + vload8(0, sums + j + left), 0, sums + j);
    }
    return halve_8(vload8(0, sums));
}

// Codes of the `count` keys that are not PROFILE_ZERO. `low` and `step` send each element's near value to one of 256 buckets in order,
// zeros to one behind them; insertion does the rest.
inline void profile_ranks(const uint *keys, const float *near, uint n, uint count, float low, float step, uchar *codes) {
    int bucket[256];
    uint ends[257];
    ulong sorted[260];
    for (uint j = 0; j < n; j += 8) {
        const int8 there = vload8(0, keys + j) != PROFILE_ZERO;
        const int8 place = convert_int8(select((float8)(0.0f), vload8(0, near + j) - low, there) * step);
        vstore8(select((int8)(256), min(place, (int8)(255)), there), 0, bucket + j);
        vstore8((uchar8)(0), 0, codes + j);
    }
    for (uint i = 0; i < 257; i++) ends[i] = 0;
    for (uint i = 0; i < n; i++) ends[bucket[i]]++;
    uint before = 0;
    for (uint i = 0; i < 257; i++) {
        const uint own = ends[i];
        ends[i] = before;
        before += own;
    }
    for (uint i = 0; i < n; i++) sorted[ends[bucket[i]]++] = (ulong)keys[i] << 32 | i;
    // The last four wait in order, so that few of those that came late have to go further back: a step that depends on no guess of
    // the processor's. The first four that leave are none, and everything stands four places on in the end.
    ulong first = 0;
    ulong second = 0;
    ulong third = 0;
    ulong fourth = 0;
    for (uint i = 0; i < count; i++) {
        const ulong pair = sorted[i];
        const ulong next = min(first, pair);
        first = min(second, max(first, pair));
        second = min(third, max(second, pair));
        third = min(fourth, max(third, pair));
        fourth = max(fourth, pair);
        uint j = i;
        for (; j > 0 && sorted[j - 1] > next; j--) sorted[j] = sorted[j - 1];
        sorted[j] = next;
    }
    sorted[count] = first;
    sorted[count + 1] = second;
    sorted[count + 2] = third;
    sorted[count + 3] = fourth;
    // 1 + ((2*rank + 1) * 255) / (2*count), step by step.
    const uint twice = 2 * count;
    const uint whole = 510 / twice;
    const uint rest = 510 - whole * twice;
    const uint begin = 255 / twice;
    uint code = 1 + begin;
    uint part = 255 - begin * twice;
    for (uint rank = 0; rank < count; rank++) {
        codes[(uint)sorted[rank + 4]] = (uchar)code;
        part += rest;
        code += whole;
        if (part >= twice) {
            part -= twice;
            code++;
        }
    }
}

inline float2 profile_encode(float *x, uint n, uchar *codes) {
    uint keys[256];
    uint8 least_8 = (uint8)(PROFILE_ZERO);
    uint8 most_8 = (uint8)(0);
    uint8 count_8 = (uint8)(0);
    for (uint j = 0; j < n; j += 8) {
        const uint8 key = profile_keys(vload8(0, x + j));
        const int8 there = key != PROFILE_ZERO;
        least_8 = min(least_8, key);
        most_8 = max(most_8, select((uint8)(0), key, there));
        count_8 += select((uint8)(0), (uint8)(1), there);
        vstore8(key, 0, keys + j);
    }
    uint ends[16];
    vstore8(least_8, 0, ends);
    vstore8(most_8, 0, ends + 8);
    uint least = ends[0];
    uint most = ends[8];
    for (uint i = 1; i < 8; i++) {
        least = min(least, ends[i]);
        most = max(most, ends[i + 8]);
    }
    const uint count = sum_8(count_8);
    const bool finite = profile_finite(least, most);
    if (count == 0 || !finite) {
        const float all = count == 0 ? 0.0f : NAN;
        for (uint j = 0; j < n; j += 8) vstore8((uchar8)(count == 0 ? 0 : 1), 0, codes + j);
        return (float2)(all, all);
    }
    const float low = profile_value(least);
    const float high = profile_value(most);
    const float power = profile_power(low, high);
    const float inverse = 1.0f / power;
    for (uint j = 0; j < n; j += 8) {
        vstore8(select((float8)(0.0f), vload8(0, x + j) * inverse, vload8(0, keys + j) != PROFILE_ZERO), 0, x + j);
    }
    const float near_low = low * inverse;
    const float near_high = high * inverse;
    const float mean = profile_mean(profile_sum(x), (float)count, near_low, near_high);
    profile_ranks(keys, x, n, count, near_low, near_high > near_low ? 255.0f / (near_high - near_low) : 0.0f, codes);
    for (uint j = 0; j < n; j += 8) {
        const float8 apart = select((float8)(0.0f), vload8(0, x + j) - mean, vload8(0, keys + j) != PROFILE_ZERO);
        vstore8(apart * apart, 0, x + j);
    }
    return (float2)(mean * power, profile_scale(profile_sum(x), (float)count) * power);
}
% endif
