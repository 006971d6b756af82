<%doc>
Numbers in 8 bits, a scale a block, as memtrain_cl/reference/blockwise.py states them: scales, and vectors of WIDTH there and back. Expects
GPU, ALIGNED, CODING ("linear" or "dynamic"), CHANCE (codes are rounded stochastically), CODES ("int8" for linear, "uint8" for dynamic), and
_rows.cl, _codes.cl, _quantize.cl.

block_scale(most)     the scale of a block whose largest magnitude has these bits; NaN where it is not finite
block_divisor(most), block_least(most)    of the same: what numbers are divided by, and the least bits of a magnitude that counts
encode_<kind>(v, divisor, least, positive, ...)    the codes of WIDTH numbers, as numbers; kind: signed or unsigned, which are one where
                      linear; positive: one above 0 that counts keeps a code above that of 0
decode_<kind>(codes, at, left, ...)    WIDTH numbers, still to be multiplied by the scale; what lies beyond `left` of them is 0
where `...` is the map if dynamic, then, if CHANCE, uniform numbers. The map is 256 numbers in order, 255 midpoints, and as much for the
unsigned map from MAP_UNSIGNED on. On GPUs it lies in local memory, where work-items read different places at once.
</%doc>
<%
SPACE = "__local" if GPU else "__global"
MAP = f", const {SPACE} float *map" if CODING == "dynamic" else ""
OF_MAP = ", map" if CODING == "dynamic" else ""
DRAWN = ", vec u" if CHANCE else ""
OF_DRAWN = ", u" if CHANCE else ""
N = WIDTH
%>
// The bits of 127 * 2^-126: the scale of a block that has such a number is a normal one.
#define LEAST_BLOCK 0x03fe0000u
#define MAP_SIZE 512
#define MAP_UNSIGNED 512

inline uint block_counts(uint most) { return most >= LEAST_BLOCK && most < LEAST_INFINITE; }

inline float block_divisor(uint most) { return block_counts(most) ? as_float(most)${" / 127.0f" if CODING == "linear" else ""} : 1.0f; }

inline float block_scale(uint most) { return as_float(most < LEAST_INFINITE ? as_uint(block_divisor(most)) : 0x7fc00000u); }

inline uint block_least(uint most) { return block_counts(most) ? LEAST_NORMAL : 0xffffffffu; }

% if CODING == "linear":
% for kind in ("signed", "unsigned"):
inline vec decode_${kind}(const __global char *codes, ulong at, uint left) { return take_codes(codes, at, left); }

inline vec nearest_${kind}(vec y${DRAWN}) {
% if CHANCE:
    const vec below = floor(y);
    return clamp(select(below, below + 1.0f, u < y - below), -127.0f, 127.0f);
% else:
    return clamp(rint(y), -127.0f, 127.0f);
% endif
}

% endfor
% else:
inline vec mapped(int${N} place${MAP}) { return (vec)(${", ".join(f"map[place.s{i}]" for i in range(N))}); }

% for kind, zero, last in (("signed", 127, 128), ("unsigned", 0, 255)):
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

// Where a magnitude lies among the map's numbers from 0 on: number k at k, the last one (1) half before that. A decade's numbers lie a step
// apart, those of the next one five such steps: a line for each decade, of which the lowest counts.
inline vec place_${kind}(vec a) {
<%
LINES = []
for decade in range(7):
    parts = 2 ** decade if kind == "signed" else 2 ** (decade + 1)
    LINES.append((parts * 10.0 ** (6 - decade) / 0.9, parts * 8 / 9 - (0.5 if kind == "signed" else 1.5)))
%>
    vec place = a * ${f"{LINES[0][0]:.9e}"}f + ${f"{LINES[0][1]:.9e}"}f;
% for slope, start in LINES[1:]:
    place = min(place, a * ${f"{slope:.9e}"}f + ${f"{start:.9e}"}f);
% endfor
    return place;
}

// `k` counts from the map's zero. Its estimate is off by one at most, which the map's own numbers decide.
inline vec nearest_${kind}(vec y${MAP}${DRAWN}) {
% if kind == "signed":
    const vec a = fabs(y);
    const int${N} below = y < 0.0f;
% else:
    const vec a = max(y, 0.0f);
% endif
% if CHANCE:
    int${N} k = min(convert_int${N}(place_${kind}(a) + 0.5f), ${last});
    k += a < mapped(k, map + ${zero});
    const vec low = mapped(k, map + ${zero});
    const vec high = mapped(min(k + 1, ${last}), map + ${zero});
    // 0/0, above which no number lies, for the last one.
% if kind == "signed":
    const int${N} up = u < select(a - low, high - a, below) / (high - low);
    // Of a negative number, the neighbour above is the one of the smaller magnitude.
    k = select(k - up, -min(k + 1 + up, 127), below);
% else:
    k -= u < (a - low) / (high - low);
% endif
% else:
    int${N} k = min(convert_int${N}(place_${kind}(a)), ${last - 1});
    const vec middle = mapped(k, map + ${256 + zero});
    k -= (a > middle) | ((a == middle) & ((k & 1) == ${int(kind == "unsigned")}));
% if kind == "signed":
    k = select(k, -min(k, 127), below);
% endif
% endif
    return convert_float${N}(k + ${zero});
}

% endfor
% endif
% for kind, least in (("signed", 128 if CODING == "dynamic" else 1), ("unsigned", 1)):
inline vec encode_${kind}(vec v, float divisor, uint least, uint positive${MAP}${DRAWN}) {
    const int${N} counts = magnitudes(v) >= least;
    const vec y = select((vec)(0.0f), v, counts) / divisor;
    const vec code = nearest_${kind}(y${OF_MAP}${OF_DRAWN});
    return select(code, max(code, ${least}.0f), counts & (v > 0.0f) & (positive ? -1 : 0));
}

% endfor
