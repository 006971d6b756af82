<%doc>
Rows of floating elements in float32 vectors, for kernels with a row (or a few) a work-group on GPUs and a block of rows
a work-item on CPUs. The file that includes this one sets TYPES before, the element types that it loads and stores, and
renders with GPU, LANES (work-items that share a row; 1 on CPUs), SLOTS (rows a work-group; 1 on CPUs) and ALIGNED (0 on
CPUs: every row of every operand begins on four elements).

WIDTH                    elements of a vector `vec`: 4 on GPUs, 8 on CPUs
load_<type>(p)           p[0 .. WIDTH)
load_left_<type>(p, left, fill)    the same with p[left ..) not read and `fill` in its place; where rows are ALIGNED a
                         vector within a row is a whole one
store_<type>(p, v), store_left_<type>(p, left, v)    the other way
vec_sum(v), vec_max(v)   over the lanes of a vector
vec_exp(v)               exp of each lane
lanes_sum(value, own, lane)    GPUs: the sum of a float2 over the work-items of a row, in all of them

begin_rows() opens the loop over this work-item's rows, `per` of them, and end_rows() closes it. Within, `row` is the
row; on GPUs `lane` is the work-item's place in it, `own` the row's scratch, and `units` the vectors in it: 0 for a row
beyond the end, for whose sake no work-item leaves before a barrier.

begin_units() and end_units() enclose what is done with each vector of a row on GPUs, elements `j` on, of which `left`
belong to the row: a loop of HELD steps, `k`, that is unrolled so that arrays over k stay in registers, or of as many as
the row needs where HELD is 0.
</%doc>
<%!
def first_stage(lanes):
    # About the square root of the lanes: the sums of both stages are then equally long.
    return 1 << lanes.bit_length() // 2
%>
<%def name="begin_rows()">
% if GPU:
    __local float2 scratch[${SLOTS * (LANES + first_stage(LANES))}];
    const uint lane = get_local_id(0) % ${LANES};
    const uint slot = get_local_id(0) / ${LANES};
    __local float2 *own = scratch + slot * ${LANES + first_stage(LANES)};
    for (uint turn = 0; turn < per; turn++) {
        const size_t row = ((size_t)turn * get_num_groups(0) + get_group_id(0)) * ${SLOTS} + slot;
        const uint units = row < rows ? (n - 1) / 4 + 1 : 0;
% else:
    const size_t first = get_global_id(0) * (size_t)per;
    const size_t last = min(first + per, (size_t)rows);
    for (size_t row = first; row < last; row++) {
% endif
</%def>
<%def name="end_rows()">
    }
</%def>
<%def name="begin_units()">
% if HELD:
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) {
            const uint unit = lane + k * ${LANES};
            const uint j = 4 * unit;
            const uint left = n - j;
            if (unit < units) {
% else:
        for (uint unit = lane; unit < units; unit += ${LANES}) {
            const uint j = 4 * unit;
            const uint left = n - j;
            {
% endif
</%def>
<%def name="end_units()">
            }
        }
</%def>
<%
WIDTH = 4 if GPU else 8
ALIGNED_ROWS = GPU and ALIGNED
%>
typedef float${WIDTH} vec;

% if "bfloat16" in TYPES:
inline vec bfloat16_vec(ushort${WIDTH} bits) { return as_float${WIDTH}(convert_uint${WIDTH}(bits) << 16); }

inline ushort${WIDTH} bfloat16_bits(vec value) {
    const uint${WIDTH} bits = as_uint${WIDTH}(value);
    const uint${WIDTH} rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint${WIDTH} nan = as_uint${WIDTH}(isnan(value));
    return convert_ushort${WIDTH}((rounded & ~nan) | (0x7fc0u & nan));
}
% endif
% for t in sorted(set(TYPES)):
<%
P = f"const __global {stored(t)} *p"
OUT = f"__global {stored(t)} *p"
if t == "float16":
    a = "a" if ALIGNED_ROWS else ""
    READ, WRITE = f"vload{a}_half{WIDTH}(0, p)", f"vstore{a}_half{WIDTH}_rte(v, 0, p)"
elif t == "bfloat16":
    READ = "*(const __global ushort4 *)p" if ALIGNED_ROWS else f"vload{WIDTH}(0, p)"
    READ = f"bfloat16_vec({READ})"
    WRITE = "*(__global ushort4 *)p = bfloat16_bits(v)" if ALIGNED_ROWS else f"vstore{WIDTH}(bfloat16_bits(v), 0, p)"
else:
    READ = "*(const __global float4 *)p" if ALIGNED_ROWS else f"vload{WIDTH}(0, p)"
    WRITE = "*(__global float4 *)p = v" if ALIGNED_ROWS else f"vstore{WIDTH}(v, 0, p)"
%>
inline vec load_${t}(${P}) { return ${READ}; }

inline vec load_left_${t}(${P}, uint left, float fill) {
% if ALIGNED_ROWS:
    return load_${t}(p);
% else:
    if (left >= ${WIDTH}) return load_${t}(p);
    float part[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) part[i] = fill;
    for (uint i = 0; i < left; i++) part[i] = ${load(t, "p", "i")};
    return vload${WIDTH}(0, part);
% endif
}

inline void store_${t}(${OUT}, vec v) { ${WRITE}; }

inline void store_left_${t}(${OUT}, uint left, vec v) {
% if ALIGNED_ROWS:
    store_${t}(p, v);
% else:
    if (left >= ${WIDTH}) {
        store_${t}(p, v);
        return;
    }
    float part[${WIDTH}];
    vstore${WIDTH}(v, 0, part);
    for (uint i = 0; i < left; i++) ${store(t, "p", "i", "part[i]")};
% endif
}
% endfor
// Through memory at the end: Oclgrind's check for uninitialised values ends the process on shuffles of undefined lanes.
inline float vec_sum(vec v) {
    const float4 four = ${"v" if GPU else "v.lo + v.hi"};
    float two[2];
    vstore2(four.lo + four.hi, 0, two);
    return two[0] + two[1];
}

// max, not fmax: a NaN among the lanes may be lost or kept, as the processor likes it.
inline float vec_max(vec v) {
    const float4 four = ${"v" if GPU else "max(v.lo, v.hi)"};
    float two[2];
    vstore2(max(four.lo, four.hi), 0, two);
    return max(two[0], two[1]);
}

% if GPU:
inline vec vec_exp(vec x) { return exp(x); }

<% STAGE = first_stage(LANES) %>
// Two barriers: the values are read before the second, the partial sums before the first of the next call.
inline float2 lanes_sum(float2 value, __local float2 *own, uint lane) {
    own[lane] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < ${STAGE}) {
        float2 sum = own[lane];
        #pragma unroll
        for (uint i = 1; i < ${LANES // STAGE}; i++) sum += own[lane + ${STAGE} * i];
        own[${LANES} + lane] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float2 sum = own[${LANES}];
    #pragma unroll
    for (uint i = 1; i < ${STAGE}; i++) sum += own[${LANES} + i];
    return sum;
}
% else:
// exp of numbers up to 88, within 2 units in the last place and 0 where it is below 2^-126: x = k*ln(2) + r, and a polynomial
// of r. Built-in functions of vectors go lane by lane.
inline vec vec_exp(vec x) {
    const vec bounded = min(x, 88.0f);
    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
    const vec shifted = bounded * 1.44269504088896340736f + 12582912.0f;
    const vec k = shifted - 12582912.0f;
    const vec r = (bounded - k * 0.693359375f) + k * 2.12194440054690583e-4f;
    vec series = (vec)(0.00138144591f);
    series = series * r + 0.00836878084f;
    series = series * r + 0.0416683927f;
    series = series * r + 0.166665196f;
    series = series * r + 0.49999994f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    const vec power = as_float8((as_int8(shifted) << 23) + 0x3f800000);
    // min may lose a NaN.
    return as_float8((as_int8(series * power) & ~(x < -87.33f)) | (isnan(x) & 0x7fc00000));
}
% endif
