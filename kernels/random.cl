// Random numbers: element i of a tensor takes its bits from hash(stream, i), never from work-group shape or global state, and
// every step from bits to numbers is exact or rounds in one way, so that all devices give the same bytes. A stream belongs to
// one operation.
//
// A work-item owns WIDE consecutive elements of a contiguous tensor, and computes them as a vector.
// Launched by memtrain_cl/launchers/random.py, whose tests hold the same arithmetic in NumPy.
// Constants: PART (fill, mask, draw: the kernels that are built), WIDE (8 or 4), T (element type), P (type of probabilities),
// WG_SIZE (items of a group that draws one category together, a power of two; 1 on a CPU).
#pragma OPENCL FP_CONTRACT OFF

<%
VECTOR_WIDTHS = (1, WIDE // 2, WIDE)
PLACES = ", ".join(str(place) for place in range(WIDE))

def lanes_of(kind, vector, name="lane"):
    return f"{kind} {name}[{WIDE}]; vstore{WIDE}({vector}, 0, {name});"

LANES = lanes_of("float", "value")
BIT_LANES = lanes_of("uint", "value")
HALVES = (("upper", "high"), ("lower", "low"), ("narrow_part", "narrow_lane"))
WIDE_LANES = " ".join(lanes_of("uint", vector, name) for vector, name in HALVES)
%>
#include "_types.cl"
#include "_rng.cl"
#include "_faults.cl"

// hash(0) is 0, so that only tensors beyond 2^32 elements are salted.
inline uint salt_of(const ulong i) {
    const uint high = (uint)(i >> 32);
    return high ? index_salt(high) : 0u;
}

// [0, 1) in steps of 2^-24.
inline float uniform_at(const uint stream, const ulong i) {
    return uniform_of_1(hash_head_1((uint)i ^ salt_of(i)), stream ^ stream >> 16);
}

// The places i .. i + WIDE - 1, hashed up to the last step; i is a multiple of WIDE, so none of them passes 2^32 without the
// others.
inline uint${WIDE} heads_at(const ulong i) { return hash_head_${WIDE}(((uint)i + (uint${WIDE})(${PLACES})) ^ salt_of(i)); }

inline float${WIDE} uniforms_at(const uint stream, const ulong i) {
    return uniform_of_${WIDE}(heads_at(i), stream ^ stream >> 16);
}

inline uint${WIDE} bits_at(const uint stream, const ulong i) {
    const uint${WIDE} head = heads_at(i);
    return hash_u32_${WIDE}(stream ^ head ^ head >> 16);
}

% for V in VECTOR_WIDTHS:
<% S = "" if V == 1 else str(V) %>
// The odd multiples of 2^-24, which lie in (0, 1), from the multiples in [0, 1).
inline float${S} open_${V}(const float${S} u) {
    return convert_float${S}(convert_int${S}(u * 16777216.0f) | 1) * 5.9604644775390625e-8f;
}

// ln(u) of a normal number u: u = 2^e * f with f from sqrt(1/2) to sqrt(2), and ln f = 2*artanh((f-1)/(f+1)) as a series.
inline float${S} portable_log_${V}(const float${S} u) {
    const uint${S} bits = as_uint${S}(u) - 0x3f3504f3u;
    const float${S} e = convert_float${S}(as_int${S}(bits) >> 23);
    const float${S} f = as_float${S}((bits & 0x7fffffu) + 0x3f3504f3u);
    const float${S} s = (f - 1.0f) / (f + 1.0f);
    const float${S} z = s * s;
    float${S} series = z * 0.22222222f + 0.28571430f;
    series = series * z + 0.40000001f;
    series = series * z + 0.66666669f;
    series = series * z + 2.0f;
    // ln 2 in two parts: e times the first is exact.
    return e * 0.693359375f + (s * series + e * -2.12194440e-4f);
}

// cos and sin of 2*pi*v for v in [0, 1): v lies within half a quarter turn of a whole one, and the series see that angle.
inline float${S} portable_cos_sin_${V}(const float${S} v, float${S} *sine) {
    const float${S} quarters = v * 4.0f;
    const int${S} q = convert_int${S}(quarters + 0.5f);
    const float${S} x = (quarters - convert_float${S}(q)) * 1.57079637f;
    const float${S} z = x * x;
    float${S} c = z * 2.4801588e-5f + -1.3888889e-3f;
    c = c * z + 4.1666668e-2f;
    c = c * z + -0.5f;
    c = c * z + 1.0f;
    float${S} s = z * 2.7557319e-6f + -1.9841270e-4f;
    s = s * z + 8.3333338e-3f;
    s = s * z + -1.6666667e-1f;
    s = s * z + 1.0f;
    s = s * x;
    // A quarter turn swaps the two and a half turn negates them; by bits, as compilers make little of vector conditions.
    const uint${S} swap = as_uint${S}(-(q & 1));
    const uint${S} of_c = as_uint${S}(c);
    const uint${S} of_s = as_uint${S}(s);
    const uint${S} turned = (of_c ^ of_s) & swap;
    *sine = as_float${S}((of_s ^ turned) ^ as_uint${S}(q & 2) << 30);
    return as_float${S}((of_c ^ turned) ^ as_uint${S}((q + 1) & 2) << 30);
}
% endfor

// Stores the caller's expression of lane u for each of the item's elements; `whole` is what a vector store takes.
<%def name="store_each(lanes, whole=None)">
% if whole and T == "float32":
    if (first + ${WIDE} <= n) {
        vstore${WIDE}(${whole}, 0, out + out0 + first);
        return;
    }
% endif
    ${lanes}
    for (uint u = 0; u < ${WIDE}; u++) {
        const ulong i = first + u;
        if (i < n) {
            ${caller.body()}
        }
    }
</%def>

% if PART == "fill":
// from + (to - from)*u; where that rounds to `to` or beyond, from.
__kernel void uniform_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float from,
                           const float to) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    const float${WIDE} value = uniforms_at(stream, first) * (to - from) + from;
    const int${WIDE} below = value < to;
    const int${WIDE} else_from = as_int${WIDE}((float${WIDE})(from)) & ~below;
    const float${WIDE} inside = as_float${WIDE}((as_int${WIDE}(value) & below) | else_from);
    <%self:store_each lanes="${lanes_of('float', 'inside')}" whole="inside">
        ${store(T, "out", "out0 + i", "lane[u]")};
% if T != "float32":
        // Its store rounds once more.
        if (${load(T, "out", "out0 + i")} >= to) ${store(T, "out", "out0 + i", "from")};
% endif
    </%self:store_each>
}

// mean + std*z: Box and Muller's pair of normal numbers from two uniform ones.
__kernel void normal_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float mean,
                          const float std) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    // Through memory: of swizzles compilers make shuffles with undefined lanes, on which Oclgrind's check for uninitialised
    // values ends the process.
    float lane[${WIDE}];
    float even[${WIDE // 2}];
    float odd[${WIDE // 2}];
    vstore${WIDE}(uniforms_at(stream, first), 0, lane);
    for (uint k = 0; k < ${WIDE // 2}; k++) {
        even[k] = lane[2 * k];
        odd[k] = lane[2 * k + 1];
    }
    const float${WIDE // 2} logarithm = portable_log_${WIDE // 2}(open_${WIDE // 2}(vload${WIDE // 2}(0, even)));
    const float${WIDE // 2} radius = sqrt(logarithm * -2.0f);
    float${WIDE // 2} sine;
    const float${WIDE // 2} cosine = portable_cos_sin_${WIDE // 2}(vload${WIDE // 2}(0, odd), &sine);
    vstore${WIDE // 2}(radius * cosine * std + mean, 0, even);
    vstore${WIDE // 2}(radius * sine * std + mean, 0, odd);
    for (uint k = 0; k < ${WIDE // 2}; k++) {
        lane[2 * k] = even[k];
        lane[2 * k + 1] = odd[k];
    }
    <%self:store_each lanes="" whole="${'vload' + str(WIDE) + '(0, lane)'}">
        ${store(T, "out", "out0 + i", "lane[u]")};
    </%self:store_each>
}

// -ln(u)/rate, never 0.
__kernel void exponential_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream,
                               const float rate) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    const float${WIDE} value = -portable_log_${WIDE}(open_${WIDE}(uniforms_at(stream, first))) / rate;
    <%self:store_each lanes="${LANES}" whole="value">
        ${store(T, "out", "out0 + i", "lane[u]")};
    </%self:store_each>
}

// 1 with probability p, else 0.
__kernel void bernoulli_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream, const float p) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    const float${WIDE} value = uniforms_at(stream, first);
    <%self:store_each lanes="${LANES}">
        ${store(T, "out", "out0 + i", f"({compute(T)})(lane[u] < p)")};
    </%self:store_each>
}

// from + floor(range*b/2^64) of 64 random bits b; range 0 stands for 2^64.
__kernel void integer_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream,
                           const uint stream_low, const long from, const ulong range) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    const uint${WIDE} upper = bits_at(stream, first);
    const uint${WIDE} lower = bits_at(stream_low, first);
    // Below 2^32 the product's upper half needs 32 bits: its carry comes from the two middle parts.
    const int narrow = range != 0 && range >> 32 == 0;
    const uint${WIDE} middle = upper * (uint)range;
    const uint${WIDE} carried = middle + mul_hi(lower, (uint${WIDE})((uint)range));
    const uint${WIDE} narrow_part = mul_hi(upper, (uint${WIDE})((uint)range)) + (as_uint${WIDE}(carried < middle) & 1u);
    <%self:store_each lanes="${WIDE_LANES}">
        ulong part = narrow_lane[u];
        if (!narrow) {
            const ulong bits = (ulong)high[u] << 32 | low[u];
            part = range ? mul_hi(bits, range) : bits;
        }
        ${store(T, "out", "out0 + i", f"({compute(T)})(from + (long)part)")};
    </%self:store_each>
}

// The 32 bits themselves. As long as n <= 2^32 no two elements are equal.
__kernel void hash_fill(__global ${stored(T)} *out, const ulong out0, const ulong n, const uint stream) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    const uint${WIDE} value = bits_at(stream, first);
    <%self:store_each lanes="${BIT_LANES}">
        ${store(T, "out", "out0 + i", f"({compute(T)})lane[u]")};
    </%self:store_each>
}
% elif PART == "mask":
// out = mask ? x*scale : 0 with mask 1 where u < keep.
__kernel void dropout(const __global ${stored(T)} *x, const ulong x0, __global ${stored(T)} *out, const ulong out0,
                      __global uchar *mask, const ulong mask0, const ulong n, const uint stream, const float keep,
                      const float scale) {
    const ulong first = ${WIDE} * (ulong)get_global_id(0);
    const float${WIDE} value = uniforms_at(stream, first);
% if T == "float32":
    if (first + ${WIDE} <= n) {
        const int${WIDE} kept = value < keep;
        vstore${WIDE}(convert_uchar${WIDE}(kept & 1), 0, mask + mask0 + first);
        vstore${WIDE}(as_float${WIDE}(as_int${WIDE}(vload${WIDE}(0, x + x0 + first) * scale) & kept), 0, out + out0 + first);
        return;
    }
% endif
    <%self:store_each lanes="${LANES}">
        const uchar kept = lane[u] < keep;
        mask[mask0 + i] = kept;
        ${store(T, "out", "out0 + i", "kept ? " + load(T, "x", "x0 + i") + " * scale : 0.0f")};
    </%self:store_each>
}

// grad_x = mask ? grad*scale : 0. A work-item owns one element.
__kernel void dropout_backward(const __global ${stored(T)} *grad, const ulong grad0, const __global uchar *mask,
                               const ulong mask0, __global ${stored(T)} *out, const ulong out0, const ulong n,
                               const float scale) {
    const ulong i = get_global_id(0);
    if (i < n) ${store(T, "out", "out0 + i", "mask[mask0 + i] ? " + load(T, "grad", "grad0 + i") + " * scale : 0.0f")};
}

// 1 with probability p[i], else 0. A work-item owns one element.
__kernel void bernoulli_each(const __global ${stored(P)} *p, const ulong p0, __global ${stored(T)} *out, const ulong out0,
                             const ulong n, const uint stream) {
    const ulong i = get_global_id(0);
    if (i < n) ${store(T, "out", "out0 + i", f"({compute(T)})(uniform_at(stream, i) < {load(P, 'p', 'p0 + i')})")};
}
% elif PART == "draw":
// Reports rows with an element of p [rows, columns] that is negative, infinite or no number, or with `positive` 0.
__kernel void require_weights(const __global ${stored(P)} *p, const ulong p0, volatile __global long *faults,
                              const uint columns, const int positive) {
    const size_t i = get_global_id(0);
    const float weight = ${load(P, "p", "p0 + i")};
    if (!(weight >= 0.0f && weight <= 3.4028235e38f)) report(faults, ${FAULT_PROBABILITY}, (long)(i / columns), 0);
    else if (positive && weight == 0.0f) report(faults, ${FAULT_EMPTY}, (long)(i / columns), 0);
}

// out[r, s] = the category j of row r with the largest p[r, j]/q, q exponential: j with probability p[r, j] over the row's
// sum. p [rows, columns], out int64 [rows, draws]; the first of equals counts. A work-group owns a draw.
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void draw(const __global ${stored(P)} *p, const ulong p0, __global long *out, const ulong out0,
          volatile __global long *faults, const uint draws, const uint columns, const uint stream) {
    const size_t d = get_group_id(0);
    const size_t r = d / draws;
    const uint lid = get_local_id(0);
    float best = 0.0f;
    uint best_at = 0xffffffffu;
    for (uint j = lid; j < columns; j += ${WG_SIZE}) {
        const float weight = ${load(P, "p", "p0 + r * columns + j")};
        if (!(weight >= 0.0f && weight <= 3.4028235e38f)) report(faults, ${FAULT_PROBABILITY}, (long)r, 0);
        const float ratio = weight / -portable_log_1(open_1(uniform_at(stream, d * columns + j)));
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
