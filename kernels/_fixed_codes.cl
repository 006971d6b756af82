<%doc>
Codes of 8 or 4 bits on GPUs, one number at a time in fixed point, with units of 2^-24 of a code: the same codes as codes_of gives, in half its
instructions. Expects FUSED (fma is exact, also of subnormals), PTX, FAR (indices of a launch have more than one upper half), STOCHASTIC, CODES,
ALIGNED, _quantize.cl.

quantum_of(scale)                        what it takes to divide by a scale
fixed_code(v, quantum, head, mixed, bound)    an integer with the code in its highest byte, bound = levels * 2^24; without STOCHASTIC in its lowest
packed_codes(a, b, c, d)                 the codes of four such integers as they are stored, 0 for 0
stored_codes(packed, finite)             as they are stored; 0 in their place where `finite` is 0 instead of all bits
put_packed(p, at, left, stored)          writes the first `left` of them as elements at, at + 1 ... of p; where ALIGNED all of them
near(first)                              the hash's salts of indices from `first` on, less than 2^32 of them; where not FAR, of all indices
heads_near(salts, low)                   the hash's first half for four elements from such an index on, of which `low` are the low bits

A quotient is a product with the reciprocal, in two parts, and an exact remainder (Markstein's last step), which rounds right. With y the
quotient, code = floor(y) + (u < y - floor(y)) for u = k / 2^24. y - floor(y) is exact but for -1/2 < y < 0, where it rounds to a multiple of
2^-24. So code = floor(z + 1 - (k + 1) / 2^24) with z the next multiple from y upwards, or, where y < 0, the nearest one. The latter makes 0 of y
below 2^-25, and so it serves numbers that do not count as well. Quotients above levels, by rounding, become levels first: the same as cutting
the code. Of v below 2^-101 a remainder is inexact, but there 0 < y < 2^-46 is all that matters, and remains true.
</%doc>
typedef struct {
    float divisor, inverse, rest;
    // The least number of which a quotient above 0 remains.
    float least;
    uint finite;
} quantum;

inline quantum quantum_of(float scale) {
    quantum own;
    own.finite = isnan(scale) ? 0u : 0xffffffffu;
% if FUSED:
    const float known = own.finite ? scale : 1.0f;
    own.divisor = known * 0x1p-24f;
    own.inverse = 0x1p24f / known;
    own.rest = fma(-own.inverse, own.divisor, 1.0f) * own.inverse;
    // Half of the least number above 0 rounds to 0.
    own.least = known < 0x1p24f ? as_float(LEAST_NORMAL) : as_float(as_uint(known * 0x1p-75f * 0x1p-75f) + 1);
% else:
    own.divisor = own.finite ? scale : 1.0f;
    own.least = as_float(LEAST_NORMAL);
% endif
    return own;
}

inline int fixed_code(float v, quantum by, uint head, uint mixed, float bound) {
% if FUSED:
    const float first = fma(v, by.inverse, v * by.rest);
    const float y = fma(fma(-first, by.divisor, v), by.inverse, first);
% else:
    const float y = v / by.divisor * 0x1p24f;
% endif
% if STOCHASTIC:
    const float cut = fmin(fmax(y, -bound), bound);
    const float z = v >= by.least ? cut : (cut + 0x1p24f) - 0x1p24f;
    return convert_int_rtp(z) + (int)(~uniform_bits_1(head, mixed) & 0xffffffu);
% else:
    return as_int(y + 0x1.8p47f);
% endif
}

// A byte of each, the lowest or the highest.
% for name, byte in (("low", 0), ("high", 3)):
inline uint ${name}_bytes(uint a, uint b, uint c, uint d) {
% if PTX:
    uint first, last, all;
    asm("prmt.b32 %0, %1, %2, ${byte + 16 * (byte + 4)};" : "=r"(first) : "r"(a), "r"(b));
    asm("prmt.b32 %0, %1, %2, ${byte + 16 * (byte + 4)};" : "=r"(last) : "r"(c), "r"(d));
    asm("prmt.b32 %0, %1, %2, ${0x5410};" : "=r"(all) : "r"(first), "r"(last));
    return all;
% elif byte:
    return a >> 24 | (b >> 16 & 0xff00u) | (c >> 8 & 0xff0000u) | (d & 0xff000000u);
% else:
    return (a & 0xffu) | (b & 0xffu) << 8 | (c & 0xffu) << 16 | d << 24;
% endif
}
% endfor

inline uint packed_codes(int a, int b, int c, int d) {
% if CODES == "int4":
    // Digits of a sum; what is negative is made up for by the bias.
    return (uint)((a >> 24) + (b >> 24) * 16 + (c >> 24) * 256 + (d >> 24) * 4096);
% else:
    return ${"high" if STOCHASTIC else "low"}_bytes((uint)a, (uint)b, (uint)c, (uint)d);
% endif
}

inline uint stored_codes(uint packed, uint finite) { return (packed & finite)${" + 0x8888u" if CODES == "int4" else ""}; }

// Of four neighbours by one scale.
inline uint fixed_word(float4 v, quantum by, uint4 heads, uint mixed, float bound) {
    return stored_codes(packed_codes(${", ".join(f"fixed_code(v.{e}, by, heads.{e}, mixed, bound)" for e in "xyzw")}), by.finite);
}

inline void put_packed(__global ${"uchar" if CODES == "int4" else "char"} *p, ulong at, uint left, uint stored) {
% if CODES == "int4":
    p += at / 2;
% if ALIGNED:
    *(__global ushort *)p = (ushort)stored;
% else:
    p[0] = (uchar)stored;
    if (left >= 4) p[1] = (uchar)(stored >> 8);
% endif
% else:
    p += at;
% if ALIGNED:
    *(__global uint *)p = stored;
% else:
    for (uint i = 0; i < min(left, 4u); i++) p[i] = (char)(stored >> 8 * i);
% endif
% endif
}

<% SALT = "({low} < own.low ? own.after : own.salt)" if FAR else "own.salt" %>
typedef struct { uint low, salt, after; } salts;

inline salts near(ulong first) {
    const uint high = (uint)(first >> 32);
    return (salts){(uint)first, index_salt(high), index_salt(high + 1)};
}

inline uint4 heads_near(salts own, uint low) {
% if not STOCHASTIC:
    return (uint4)(0);
% elif ALIGNED:
    // The four indices differ in their last two bits alone.
    const uint base = low ^ ${SALT.format(low="low")};
    uint4 x = (uint4)(0, 1, 2, 3) ^ (base ^ base >> 16);
    x *= 0x7feb352du;
    x ^= x >> 15;
    return x * 0x846ca68bu;
% else:
    return (uint4)(${", ".join(f"hash_head_1((low + {e}) ^ {SALT.format(low=f'low + {e}')})" for e in range(4))});
% endif
}
