<%doc>
Quotients and roots of vectors of four, rounded as IEEE says, without a branch a number: where PTX is 1 (the device takes inline PTX, which means
NVIDIA's), an approximation and exact remainders by fma. The steps are those of NVIDIA's own division and root in their usual range, at whose ends
these tell their doubt instead, one flag for all numbers; who calls them then divides plainly. Expects PTX; 0 makes nothing.

quick_inverse(d)                      1/d of 2^-100 <= d <= 2^100
quick_root(v, &doubt)                 sqrt(v); doubt below QUICK_LEAST, 2^-101, 0 included, and where the root is no finite number, it is NaN
quick_quotient(a, b, least, &doubt)   a/b; doubt unless |a/b| >= least, a finite number; least >= 2^-120 and least * b >= 2^-98 have to hold
quick_part(a, known)                  a/known.x of numbers that are 0 or QUICK_PART_LEAST, 2^-100, or more; known.x within 2^-76..2^20, the quotient
                                      below 2^100, y and z the inverse in two parts
root_and_quotient(v, a, divisor, quick_divisor, least)    declares root = sqrt(v) and q = a/divisor, which is above 0 and written with `root`, as
                                      is quick_divisor, the same in quick steps; least as above
quick_code(v, d, inverse)             an integer whose low bits are v/d, rounded to float32, then half to even; |v/d| <= 127.5, d as above
quick_bytes(word)                     four bytes that are code + 128, as the codes
</%doc>
% if PTX:
#define QUICK_MAGIC 12582912.0f
#define QUICK_LEAST 0x1p-101f
// The bits of 2^-100: the remainder of a number below is less than a float32 can say.
#define QUICK_PART_LEAST 0x0d800000u
<%
LANES_OF_4 = "xyzw"
%>
inline float quick_inverse(float d) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(d));
    near = fma(near, fma(-d, near, 1.0f), near);
    return fma(near, fma(-d, near, 1.0f), near);
}

inline float4 quick_root(float4 v, bool *doubt) {
    float4 root;
% for i in LANES_OF_4:
    {
        float near;
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(v.${i}));
        const float first = v.${i} * near;
        root.${i} = fma(fma(-first, first, v.${i}), 0.5f * near, first);
        *doubt |= !(v.${i} >= QUICK_LEAST);
    }
% endfor
    return root;
}

// Negated remainders keep the sign of a zero.
inline float4 quick_quotient(float4 a, float4 b, float least, bool *doubt) {
    float4 result;
% for i in LANES_OF_4:
    {
        float near;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(b.${i}));
        near = fma(near, fma(-b.${i}, near, 1.0f), near);
        const float first = a.${i} * near;
        const float second = fma(-fma(b.${i}, first, -a.${i}), near, first);
        result.${i} = fma(-fma(b.${i}, second, -a.${i}), near, second);
        *doubt |= !(fabs(result.${i}) >= least);
    }
% endfor
    return result;
}

inline float4 quick_part(float4 a, float4 known) {
    const float4 first = fma(a, (float4)(known.y), a * known.z);
    return fma(-fma(first, (float4)(known.x), -a), (float4)(known.y), first);
}

// One remainder is enough: at all quotients next to a half, and all mantissas of d, the result is that of a division.
inline int4 quick_code(float4 v, float d, float inverse) {
    const float4 first = v * inverse;
    return as_int4(fma(-fma(first, (float4)(d), -v), (float4)(inverse), first) + QUICK_MAGIC);
}

// Of bytes that are code + 128: the codes. A byte behind the exponent of 2^23 is a number above that.
inline float4 quick_bytes(uint word) {
    uint4 bits;
% for i in range(4):
    asm("prmt.b32 %0, %1, %2, ${hex(0x7650 + i)};" : "=r"(bits.${LANES_OF_4[i]}) : "r"(word), "r"(0x4b000000u));
% endfor
    return as_float4(bits) - 8388736.0f;
}
% endif
<%def name="root_and_quotient(v, a, divisor, quick_divisor, least)">
% if PTX:
    // Of zeros there is no doubt.
    bool unsure = false;
    vec root = quick_root(${v}, &unsure);
    vec q = quick_quotient(${a}, ${quick_divisor}, ${least}, &unsure);
    if (unsure) {
        bool doubt = false;
% for i in "xyzw":
        {
            const bool still = ${a}.${i} == 0.0f;
            const bool none = still && ${v}.${i} == 0.0f;
            // Of an infinite v the quick steps make no number.
            doubt |= !none && !(${v}.${i} >= QUICK_LEAST && (still ? q.${i} == 0.0f : fabs(q.${i}) >= ${least}));
            root.${i} = none ? 0.0f : root.${i};
            q.${i} = none ? ${a}.${i} : q.${i};
        }
% endfor
        if (doubt) {
            root = sqrt(${v});
            q = ${a} / (${divisor});
        }
    }
% else:
    const vec root = sqrt(${v});
    const vec q = ${a} / (${divisor});
% endif
</%def>
