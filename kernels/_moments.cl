<%doc>
Numbers in 8 bits, a scale a block, as memtrain_cl/reference/blockwise.py states them: scales, and vectors of WIDTH there and back. Expects
GPU, ALIGNED, PTX, CODING ("linear" or "dynamic"), CHANCE (codes are rounded stochastically), CODES ("int8" for linear, "uint8" for dynamic), and
_rows.cl, _codes.cl, _quantize.cl, _exact.cl.

coder_of(most)        the scale of a block whose largest magnitude has these bits (NaN where it is not finite), and what it takes to encode
encode_<kind>(v, coder, positive, ...)    integers whose low bits are the codes of WIDTH numbers; kind: signed or unsigned, which are one
                      where linear; positive: one above 0 that counts keeps a code above that of 0
guess_<kind>(v, coder, positive, close)   CPUs, to nearest: the same in less time, but for what is so close to where a code turns that the
                      quotient has to say; *close becomes other than 0 in such lanes. It begins as never_guess(coder)
decode_<kind>(codes, at, left, ...)    WIDTH numbers, still to be multiplied by the scale; what lies beyond `left` of them is 0. Where PTX is 1, of
                      the codes that taken_word gives, so that they can wait in one register
taken_word(codes, at, left, zero)      PTX: four codes, `zero` in the place of those beyond `left`
where `...` is the map if dynamic, then, if CHANCE, uniform numbers. The map is 256 numbers in order, 255 midpoints, and as much for the
unsigned map from MAP_UNSIGNED on. On GPUs it lies in local memory, where work-items read different places at once. Minima of integers are of
two vectors: Oclgrind 21.10 finds lanes without a value where one is a scalar.
</%doc>
<%
SPACE = "__local" if GPU else "__global"
MAP = f", const {SPACE} float *map" if CODING == "dynamic" else ""
OF_MAP = ", map" if CODING == "dynamic" else ""
DRAWN = ", vec u" if CHANCE else ""
N = WIDTH
%>
// The bits of 127 * 2^-126: the scale of a block that has such a number is a normal one.
#define LEAST_BLOCK 0x03fe0000u
// The bits of WHOLE_MAGIC.
#define WHOLE_BITS 0x4b400000
#define MAP_SIZE 512
#define MAP_UNSIGNED 512

typedef struct {
    float scale;
    // What numbers are divided by; what they are multiplied by for a guess or a quick quotient, 0 where that could be a bad one.
    float divisor, inverse${", rest" if PTX else ""};
    // The least bits of a magnitude that counts.
    uint least;
} coder;

inline coder coder_of(uint most) {
    const uint counts = most >= LEAST_BLOCK && most < LEAST_INFINITE;
    coder own;
% if PTX:
% if CODING == "linear":
    // As the quotient by 127 at all numbers.
    const float first = as_float(most) * 0x1.020408p-7f;
    own.divisor = counts ? fma(-fma(first, 127.0f, -as_float(most)), 0x1.020408p-7f, first) : 1.0f;
% else:
    own.divisor = counts ? as_float(most) : 1.0f;
% endif
    const bool usual = counts && own.divisor >= 0x1p-76f && own.divisor <= 0x1p20f;
    own.inverse = usual ? quick_inverse(own.divisor) : 0.0f;
    own.rest = fma(-own.inverse, own.divisor, 1.0f) * own.inverse;
% else:
    own.divisor = counts ? as_float(most)${" / 127.0f" if CODING == "linear" else ""} : 1.0f;
    own.inverse = counts && own.divisor >= 0x1p-100f ? 1.0f / own.divisor : 0.0f;
% endif
    own.least = counts ? LEAST_NORMAL : 0xffffffffu;
    own.scale = as_float(most < LEAST_INFINITE ? as_uint(own.divisor) : 0x7fc00000u);
    return own;
}

inline vec quotient(vec v, coder own) {
% if PTX:
    // To nearest, less than 2^-100 of such a divisor turns no code.
    if (own.inverse > 0.0f${" && !any(magnitudes(v) < QUICK_PART_LEAST)" if CHANCE else ""}) return quick_part(v, (float4)(own.divisor, own.inverse, own.rest, 0.0f));
% endif
    return select((vec)(0.0f), v, magnitudes(v) >= own.least) / own.divisor;
}

// Numbers above 0 that count get a code above that of 0, `one`.
inline int${N} kept_positive(int${N} code, vec v, coder own, int one) {
% if PTX:
    if (own.least != LEAST_NORMAL) return code;
% for i in "xyzw":
    if (v.${i} >= 0x1p-126f) code.${i} = max(code.${i}, one);
% endfor
    return code;
% else:
    return select(code, max(code, (int${N})(one)), (magnitudes(v) >= own.least) & (v > 0.0f));
% endif
}

% if PTX:
inline uint taken_word(const __global ${CODE} *codes, ulong at, uint left, uint zero) {
    codes += at;
% if ALIGNED:
    return *(const __global uint *)codes;
% else:
    uint word = 0;
    for (uint i = 0; i < 4; i++) word |= (i < left ? (uint)(uchar)codes[i] : zero) << 8 * i;
    return word;
% endif
}

% endif
% if CODING == "linear":
% for kind in ("signed", "unsigned"):
% if PTX:
inline vec decode_${kind}(uint word) { return quick_bytes(word ^ 0x80808080u); }
% else:
inline vec decode_${kind}(const __global char *codes, ulong at, uint left) { return take_codes(codes, at, left); }
% endif

inline int${N} encode_${kind}(vec v, coder own, uint positive${DRAWN}) {
    if (own.least != LEAST_NORMAL) return (int${N})(0);
% if CHANCE:
    const vec y = quotient(v, own);
    const vec below = floor(y);
    const int${N} code = convert_int${N}(clamp(select(below, below + 1.0f, u < y - below), -127.0f, 127.0f));
    return positive ? kept_positive(code, v, own, 1) : code;
% else:
    // Adding the magic number rounds half to even.
    const int${N} code = ${"own.inverse > 0.0f ? quick_code(v, own.divisor, own.inverse) : " if PTX else ""}as_int${N}(quotient(v, own) + WHOLE_MAGIC);
    return positive ? kept_positive(code, v, own, WHOLE_BITS + 1) : code;
% endif
}

% if not (GPU or CHANCE):
// A product with the inverse rounds as the quotient does, unless that lies near a half.
inline int8 guess_${kind}(vec v, coder own, uint positive, int8 *close) {
    const vec y = v * own.inverse;
    const vec rounded = y + WHOLE_MAGIC;
    *close |= fabs(y - (rounded - WHOLE_MAGIC)) > 0.4999f;
    const int8 code = as_int8(rounded);
    return positive ? select(code, max(code, (int8)(WHOLE_BITS + 1)), as_int8(v) >= (int)LEAST_NORMAL) : code;
}

% endif
% endfor
% else:
inline vec mapped(int${N} place${MAP}) { return (vec)(${", ".join(f"map[place.s{i}]" for i in range(N))}); }

% for kind, zero, last in (("signed", 127, 128), ("unsigned", 0, 255)):
% if PTX:
inline vec decode_${kind}(uint word${MAP}) { return mapped(convert_int4(as_uchar4(word)), map); }
% else:
inline vec decode_${kind}(const __global uchar *codes, ulong at, uint left${MAP}) {
    codes += at;
% if not (GPU and ALIGNED):
    if (left < ${N}) {
        int own[${N}];
        for (uint i = 0; i < ${N}; i++) own[i] = i < left ? (int)codes[i] : ${zero};
        return mapped(vload${N}(0, own), map);
    }
% endif
    return mapped(convert_int${N}(vload${N}(0, codes)), map);
}
% endif

// Where a magnitude lies among the map's numbers from 0 on: number k at k, the last one (1) half before that. A decade's numbers lie a step
// apart, those of the next one five such steps: a line for each decade, of which the lowest counts.
<%
LINES = []
for decade in range(7):
    parts = 2 ** decade if kind == "signed" else 2 ** (decade + 1)
    LINES.append(f"a * {parts * 10.0 ** (6 - decade) / 0.9:.9e}f + {parts * 8 / 9 - (0.5 if kind == 'signed' else 1.5):.9e}f")
%>
inline vec place_${kind}(vec a) {
    vec place = ${LINES[0]};
% for line in LINES[1:]:
    place = min(place, ${line});
% endfor
    return place;
}

// `k` counts from the map's zero. Its estimate is off by one at most, which the map's own numbers decide.
inline int${N} encode_${kind}(vec v, coder own, uint positive${MAP}${DRAWN}) {
    if (own.least != LEAST_NORMAL) return (int${N})(${zero});
    const vec y = quotient(v, own);
% if kind == "signed":
    const vec a = fabs(y);
    const int${N} below = y < 0.0f;
% else:
    const vec a = max(y, 0.0f);
% endif
% if CHANCE:
    int${N} k = min(convert_int${N}(place_${kind}(a) + 0.5f), (int${N})(${last}));
    k += a < mapped(k, map + ${zero});
    const vec low = mapped(k, map + ${zero});
    const vec high = mapped(min(k + 1, (int${N})(${last})), map + ${zero});
    // 0/0, above which no number lies, for the last one.
% if kind == "signed":
    const int${N} up = u < select(a - low, high - a, below) / (high - low);
    // Of a negative number, the neighbour above is the one of the smaller magnitude.
    k = select(k - up, -min(k + 1 + up, (int${N})(127)), below);
% else:
    k -= u < (a - low) / (high - low);
% endif
% else:
    int${N} k = min(convert_int${N}(place_${kind}(a)), (int${N})(${last - 1}));
    const vec middle = mapped(k, map + ${256 + zero});
    k -= (a > middle) | ((a == middle) & ((k & 1) == ${int(kind == "unsigned")}));
% if kind == "signed":
    k = select(k, -min(k, (int${N})(127)), below);
% endif
% endif
    return (positive ? kept_positive(k, v, own, 1) : k) + ${zero};
}

% if not (GPU or CHANCE):
// Of numbers in the last three decades, by their lines alone. The code turns half a step after a number, but seven tenths (of the next
// decade's step) after a decade's last one.
inline int8 guess_${kind}(vec v, coder own, uint positive, int8 *close) {
    const vec a = ${"fabs(v)" if kind == "signed" else "v"} * own.inverse;
    const vec place = min(min(${LINES[4]}, ${LINES[5]}), ${LINES[6]});
    const int8 k = convert_int8(place);
    const vec past = place - convert_float8(k);
    const vec turn = select((vec)(0.5f), (vec)(0.7f), ${"(k & (k + 1)) == 0" if kind == "signed" else "((k + 1) & (k + 2)) == 0"});
    *close |= (a < 1e-3f) | (fabs(past - turn) < 0.001f) | (k >= ${last - 1});
    const int8 code = k - (past > turn);
    return ${zero} + ${"select(code, -code, v < 0.0f)" if kind == "signed" else "code"};
}

% endif
% endfor
% endif
% if not (GPU or CHANCE):
// Numbers that are guessed before a look at *close, which takes as long as a guess; in a map many more are close to a turn.
#define GUESSED ${64 if CODING == "linear" else 8}

// Lanes of `close` before the first guess: all of them where the inverse is none.
inline int8 never_guess(coder own) { return (int8)(own.inverse > 0.0f ? 0 : -1); }
% endif
