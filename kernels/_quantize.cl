<%doc>
The elements of a quantiser in vectors of WIDTH, and the scale of a row, as kernels/stochastic.cl states them. Expects GPU, ALIGNED (GPU:
a vector's flat index is a multiple of four), STOCHASTIC, SAVE, _types.cl, _rng.cl.

magnitudes(v)             the bits of |v|, which order as the numbers do, with infinities and then NaNs above all
scale_of(most, levels)    the scale of elements whose largest bits are `most`; NaN where they are not finite
divisor_of, least_of      from a scale: what elements are divided by, and the least bits of a magnitude that does not count as zero
heads_at(index)           the hash's first half for WIDTH elements from a flat index on
codes_of(v, ...)          the codes of WIDTH elements, as numbers
</%doc>
<%
WIDTH = 4 if GPU else 8
V = f"float{WIDTH}"
U = f"uint{WIDTH}"
%>
#define LEAST_NORMAL 0x00800000u
#define LEAST_INFINITE 0x7f800000u
// The largest magnitude of a gradient that counts as finite, 2^63.
#define GRADIENT_MAX 0x5f000000u

inline ${U} magnitudes(${V} v) { return as_${U}(v) & 0x7fffffffu; }

// Through memory for the same reason as vec_sum.
inline uint highest(${U} all) {
    uint own[${WIDTH}];
    vstore${WIDTH}(all, 0, own);
    uint most = own[0];
    for (uint i = 1; i < ${WIDTH}; i++) most = max(most, own[i]);
    return most;
}

inline float scale_of(uint most, float levels) {
    const uint finite = most < LEAST_INFINITE;
    const float scale = fmax(as_float(finite ? most : 0u), 1e-12f) / levels;
% if SAVE:
    // Up to the next bfloat16, so that no code lies beyond the levels. What cannot come back finite counts as not finite.
    const float rounded = as_float((as_uint(scale) + 0xffffu) & 0xffff0000u);
    return as_float(finite && isfinite(rounded * levels) ? as_uint(rounded) : 0x7fc00000u);
% else:
    return as_float(finite ? as_uint(scale) : 0x7fc00000u);
% endif
}

inline float divisor_of(float scale) { return isnan(scale) ? 1.0f : scale; }

inline uint least_of(float scale) { return isnan(scale) ? 0xffffffffu : LEAST_NORMAL; }

% if not GPU:
inline ${V} divisors_of(${V} scale) { return select(scale, (${V})(1.0f), isnan(scale)); }

inline ${U} leasts_of(${V} scale) { return select((${U})(LEAST_NORMAL), (${U})(0xffffffffu), isnan(scale)); }
% endif

inline uint head_at(ulong index) {
    const uint high = (uint)(index >> 32);
    return hash_head_1((uint)index ^ (high ? index_salt(high) : 0u));
}

inline ${U} heads_at(ulong index) {
% if not STOCHASTIC:
    return (${U})(0);
% elif GPU and ALIGNED:
    // The four indices differ in their last two bits alone.
    const uint high = (uint)(index >> 32);
    const uint base = (uint)index ^ (high ? index_salt(high) : 0u);
    uint4 x = (uint4)(0, 1, 2, 3) ^ (base ^ base >> 16);
    x *= 0x7feb352du;
    x ^= x >> 15;
    return x * 0x846ca68bu;
% elif GPU:
    return (uint4)(head_at(index), head_at(index + 1), head_at(index + 2), head_at(index + 3));
% else:
    const uint low = (uint)index;
    const uint high = (uint)(index >> 32);
    if (low > 0xfffffff8u) {
        uint own[8];
        for (uint i = 0; i < 8; i++) own[i] = head_at(index + i);
        return vload8(0, own);
    }
    return hash_head_8(((uint8)(0, 1, 2, 3, 4, 5, 6, 7) + low) ^ (high ? index_salt(high) : 0u));
% endif
}

inline ${V} codes_of(${V} v, ${V} divisor, ${U} least, ${U} heads, uint mixed, float levels) {
    const ${V} y = select((${V})(0.0f), v, magnitudes(v) >= least) / divisor;
% if STOCHASTIC:
    const ${V} below = floor(y);
    const ${V} code = select(below, below + 1.0f, uniform_of_${WIDTH}(heads, mixed) < y - below);
% else:
    const ${V} code = rint(y);
% endif
    return clamp(code, -levels, levels);
}
