// A packed counter weight times one vector, each row's codes decoded as they are read: for decoding a token at a time.
//
//   y[m] = scale[m] * r * sum_k t[m, k] * g[k] * x[k]     NORM: g the norm's weight, r = 1/sqrt(mean(x^2) + eps); else 1
//   out[m] = y[m]                   ADD: add[m] + y[m]
//   GATED: out[m] = silu(y[m]) * y[M + m], of a weight of 2M rows
//
// x has no gaps; sums are float32, in an order that the sizes and the device decide. 0.75 byte a weight is read, once.
//
// GPU: a group of 256 items takes 256 / LANES sets of ROWS rows (GATED: half of them M rows on), LANES items each. An
// item reads sixteen codes of each of its rows as three words, beside the sixteen numbers that they meet (WORDS: K is a
// multiple of 16, and so rows begin on words; else four codes at a time).
// CPU: a work-item takes `per` rows. Launched by memtrain_cl/launchers/counter_matvec.py. Constants: GPU, C, NORM, ADD,
// GATED, LANES, ROWS (1 on CPUs), WORDS (0 on CPUs), FUSED.
#include "_code6.cl"
<%!
MAGIC = 3 * 2**22  # adding it to a small number and taking it away again rounds to a whole one

# (a, b) such that fma(1 + code * 2^(place - 23), a, b) is MAGIC + t: a code's bits, left at their place in a word, are
# the mantissa's. b has to be whole, so a gives way a little; t's borders lie half a code from every code.
def rounding(C, place):
    n = round(2.0 ** (23 - place) / (2 * C - 1) * centre(C, place))
    return f"{n / centre(C, place)!r}f", f"{MAGIC - n}.0f"

# What the middle code of t = 0 is as such a number.
def centre(C, place):
    return 1 + (3 * C - 2) * 2.0 ** (place - 23)

# Words in which codes lie one behind the other, and their places: of sixteen codes in w0, w1, w2, and of four.
SIXTEEN = [("w0", (0, 6, 12)), ("w0 >> 18 | w1 << 14", (0, 6, 12)), ("w1", (4, 10)), ("w1 >> 16 | w2 << 16", (0, 6, 12)),
           ("w2", (2, 8)), ("w2 >> 14", (0, 6, 12))]
FOUR = [("group", (0, 6, 12)), ("group >> 12", (6,))]
%>
<%
SETS = 256 // LANES if GPU else 1
NEAR = min(LANES, 8)
HALF = ROWS // 2 if GATED else ROWS
SUMS = ROWS + NORM
WIDTH = 16 if WORDS else 4

# The bytes of eight codes of v from byte `first` on, two a code.
def spread(v, first):
    at = [first + 3 * group + byte for group in (0, 1) for byte in (0, 1, 0, 1, 1, 2, 2, 2)]
    return "(uchar16)(" + ", ".join(f"{v}.s{byte:x}" for byte in at) + ")"

# width numbers from x[k] on, times the norm's weight.
def inputs(k, width):
    parts = [f"vload{width}(0, {name} + {k})" if width > 1 else f"{name}[{k}]" for name in (("x", "g") if NORM else ("x",))]
    return " * ".join(parts)
%>
inline float silu(const float x) { return x / (1.0f + exp(-x)); }

% if GPU:
<%
WORDS_OF = SIXTEEN if WORDS else FOUR
PLACES = sorted({place for _, places in WORDS_OF for place in places})
# The exponent of 1.0f.
ONE = 0x3f800000
%>
% for place in PLACES:
// t of the code at a word's bit ${place}. The exponent is in the word already: one operation masks both.
inline float ternary_${place}(const uint word) {
    const float number = as_float(word & ${hex(63 << place | ONE)}u);
% if FUSED:
    return fma(number, ${", ".join(rounding(C, place))}) - ${MAGIC}.0f;
% else:
    return ((number - ${repr(centre(C, place))}f) * ${repr(2.0 ** (23 - place) / (2 * C - 1))}f + ${MAGIC}.0f) - ${MAGIC}.0f;
% endif
}
% endfor

// Products with t are exact, so fused or not the sum is the same.
#define MAD(a, b, c) ${"fma((a), (b), (c))" if FUSED else "((a) * (b) + (c))"}

% if WORDS:
inline float weigh(float sum, const uint w0, const uint w1, const uint w2, const float4 x0, const float4 x1, const float4 x2, const float4 x3) {
% else:
inline float weigh(float sum, const uint group, const float4 x0) {
% endif
<% i = 0 %>\
% for n, (word, places) in enumerate(WORDS_OF):
    const uint v${n} = (${word}) | ${hex(ONE)}u;
% for place in places:
    sum = MAD(ternary_${place}(v${n}), x${i // 4}.s${i % 4}, sum);
<% i += 1 %>\
% endfor
% endfor
    return sum;
}
% else:
// Sixteen codes -> t[0 .. 16). Each pair of bytes holds its code from bit 0, 6, 4 or 2 on; shifted to the top, what lies
// below a code is less than one of it. Vectors are put together and taken apart in memory, where no compiler leaves them:
// what Oclgrind does with halves of sixteen is wrong.
inline void ternary_16(const uchar16 low, const uchar16 high, short *t) {
    const ushort16 places = (ushort16)(1024, 16, 64, 256, 1024, 16, 64, 256, 1024, 16, 64, 256, 1024, 16, 64, 256);
    ushort pairs[16];
    vstore8(as_ushort8(low), 0, pairs);
    vstore8(as_ushort8(high), 1, pairs);
    const short16 codes = as_short16(vload16(0, pairs) * places ^ (ushort16)(0x8000));
    vstore16((codes < (short16)(${((2 * C - 1) << 10) - 32768})) - (codes >= (short16)(${(2 * (2 * C - 1) << 10) - 32768})), 0, t);
}

inline float ternary_1(const uint code) { return (float)((code >= ${2 * C - 1}u) + (code >= ${2 * (2 * C - 1)}u)) - 1.0f; }

inline float sum_8(const float8 v) {
    const float4 halves = v.lo + v.hi;
    const float2 quarters = halves.lo + halves.hi;
    return quarters.x + quarters.y;
}

// sum_k t[k] * g[k] * x[k] of one row.
inline float row_product(const __global uchar *row, const __global float *x, ${"const __global float *g, " if NORM else ""}const uint K) {
% for v in range(4):
    float8 sum${v} = (float8)(0.0f);
% endfor
    uint k = 0;
    for (; k + 32 <= K; k += 32) {
        const uchar16 a = vload16(0, row + k / 4 * 3);
        const uchar16 b = vload16(0, row + k / 4 * 3 + 8);
        short t[32];
        ternary_16(${spread("a", 0)}, ${spread("a", 6)}, t);
        ternary_16(${spread("b", 4)}, ${spread("b", 10)}, t + 16);
% for v in range(4):
        sum${v} += convert_float8(vload8(${v}, t)) * (${inputs(f"k + {8 * v}", 8)});
% endfor
    }
    float total = sum_8((sum0 + sum1) + (sum2 + sum3));
    for (; k < K; k++) total += ternary_1(cc_unpack_1(row, k)) * (${inputs("k", 1)});
    return total;
}
% endif

__kernel __attribute__((reqd_work_group_size(${256 if GPU else 1}, 1, 1)))
void counter_matvec(const __global uchar *state, const __global float *scale, const __global float *x,
% if NORM:
                    const __global float *g, const float eps,
% endif
% if ADD:
                    const __global float *add,
% endif
                    __global float *out, const uint M, const uint K, const uint per) {
    const size_t row_bytes = (size_t)K / 4 * 3;
% if GPU:
    __local float sums[${SUMS}][256];
    const uint item = get_local_id(0);
    // Neighbours are ${NEAR} lanes of ${SETS} sets in turn: items that run in lock step then share the numbers of x.
    const uint lane = item % ${NEAR} + item / ${NEAR * SETS} * ${NEAR};
    const uint set = item / ${NEAR} % ${SETS};
    const uint slot = set * ${LANES} + lane;
    const uint first = (get_group_id(0) * ${SETS} + set) * ${HALF};
% for r in range(ROWS):
    // A row beyond the end is the last one again, and not stored.
    const uint m${r} = min(first + ${r % HALF}, M - 1)${" + M" if r >= HALF else ""};
    const __global uchar *row${r} = state + m${r} * row_bytes;
    float sum${r} = 0.0f;
% endfor
% if NORM:
    float squares = 0.0f;
% endif
    // The words of four turns are on their way at once.
    #pragma unroll 4
    for (uint j = lane; j < K / ${WIDTH}; j += ${LANES}) {
% for r in range(ROWS):
% if WORDS:
        const uint3 words${r} = vload3(j, (const __global uint *)row${r});
% else:
        const uint group${r} = cc_load_group(row${r} + 3 * (size_t)j);
% endif
% endfor
% for v in range(WIDTH // 4):
        float4 x${v} = *(const __global float4 *)(x + ${WIDTH} * j + ${4 * v});
% endfor
% if NORM:
% for v in range(WIDTH // 4):
        squares += dot(x${v}, x${v});
        x${v} *= *(const __global float4 *)(g + ${WIDTH} * j + ${4 * v});
% endfor
% endif
% for r in range(ROWS):
        sum${r} = weigh(sum${r}, ${f"words{r}.s0, words{r}.s1, words{r}.s2, x0, x1, x2, x3" if WORDS else f"group{r}, x0"});
% endfor
    }
% for r in range(ROWS):
    sums[${r}][slot] = sum${r};
% endfor
% if NORM:
    sums[${ROWS}][slot] = squares;
% endif
    for (uint half_of = ${LANES // 2}; half_of > 0; half_of >>= 1) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_of) {
% for v in range(SUMS):
            sums[${v}][slot] += sums[${v}][slot + half_of];
% endfor
        }
    }
    if (lane == 0) {
        const float r = ${f"1.0f / sqrt(sums[{ROWS}][slot] / K + eps)" if NORM else "1.0f"};
% for h in range(HALF):
        if (first + ${h} < M) {
% if GATED:
            out[m${h}] = silu(scale[m${h}] * r * sums[${h}][slot]) * (scale[m${h + HALF}] * r * sums[${h + HALF}][slot]);
% else:
            out[m${h}] = ${f"add[m{h}] + " if ADD else ""}scale[m${h}] * r * sums[${h}][slot];
% endif
        }
% endfor
    }
% else:
% if NORM:
    float8 squares = (float8)(0.0f);
    uint i = 0;
    for (; i + 8 <= K; i += 8) squares += vload8(0, x + i) * vload8(0, x + i);
    float rest = 0.0f;
    for (; i < K; i++) rest += x[i] * x[i];
    const float r = 1.0f / sqrt((sum_8(squares) + rest) / K + eps);
% else:
    const float r = 1.0f;
% endif
    const uint last = min((uint)get_global_id(0) * per + per, M);
    for (uint m = get_global_id(0) * per; m < last; m++) {
% for part in range(1 + GATED):
        const size_t at${part} = m${f" + (size_t){part} * M" if part else ""};
        const float y${part} = scale[at${part}] * r * row_product(state + at${part} * row_bytes, x, ${"g, " if NORM else ""}K);
% endfor
        out[m] = ${"silu(y0) * y1" if GATED else "add[m] + y0" if ADD else "y0"};
    }
% endif
}
