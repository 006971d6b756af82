// What the CPU shape of attention is made of (_attention_cpu.cl). An item keeps LANES rows as lanes of two vectors; ROWS
// rows of the other side pass by at a time, each element broadcast to the lanes. No lane meets another: maxima and sums
// over the other side are vector operations, and nothing waits. Private arrays [..][LANES]: kept rows transposed, the
// tile of scores or weights by passing row, the result by column. Built-in functions take vectors of 8, which every
// platform has; types of 16 bits are widened a block at a time (WIDEN).
<%
LANES = 2 * WIDE
V8 = range(LANES // 8)
TALL = 8 if WIDE == 16 else 6   # passing rows of a tile of products in registers
BROAD = 8 if WIDE == 16 else 4  # columns of the result in registers
WIDEN = TYPE != "float32"
ROW = "const float" if WIDEN else "const __global float"
%>
#define LANES ${LANES}u
#define LANE_0 ((int8)(0, 1, 2, 3, 4, 5, 6, 7))
#define LANE_1 ((int8)(8, 9, 10, 11, 12, 13, 14, 15))
#define LANE_2 (LANE_0 + 16)
#define LANE_3 (LANE_1 + 16)

// 2^x for x <= 127, exactly 0 below -127; a NaN stays one. Adding 1.5 * 2^23 leaves the nearest whole number in the low
// bits; the polynomial interpolates 2^t at Chebyshev's points of [-1/2, 1/2], to 3e-9.
inline float8 exp2_8(const float8 x) {
    const float8 clipped = select(x, (float8)(-127.0f), x < -127.0f);
    const float8 shifted = clipped + 12582912.0f;
    const float8 t = clipped - (shifted - 12582912.0f);
    float8 sum = (float8)(1.5461444854736328e-4f);
    sum = sum * t + 1.3400427997112274e-3f;
    sum = sum * t + 9.618056938052177e-3f;
    sum = sum * t + 5.550327152013779e-2f;
    sum = sum * t + 2.4022650718688965e-1f;
    sum = sum * t + 6.931471824645996e-1f;
    sum = sum * t + 1.0f;
    return sum * as_float8((as_int8(shifted) << 23) + (127 << 23));
}

// kept[d][lane] = rows[lane][d]; zeros in lanes beyond the rows that there are.
inline void keep_rows(float *kept, const __global ${stored(TYPE)} *rows, const ulong stride, const uint count,
                      const uint columns) {
    for (uint lane = 0; lane < LANES; lane++) {
        const __global ${stored(TYPE)} *row = rows + stride * min(lane, count - 1);
        for (uint d = 0; d < columns; d++) kept[LANES * d + lane] = lane < count ? ${load(TYPE, "row", "d")} : 0.0f;
    }
}

inline void write_rows(__global ${stored(TYPE)} *rows, const ulong stride, const uint count, const uint columns,
                       const float *result) {
    for (uint lane = 0; lane < count; lane++) {
        __global ${stored(TYPE)} *row = rows + stride * lane;
        for (uint c = 0; c < columns; c++) ${store(TYPE, "row", "c", "result[LANES * c + lane]")};
    }
}

% if WIDEN:
inline void widen_rows(float *wide, const __global ${stored(TYPE)} *rows, const ulong stride, const uint count,
                       const uint columns) {
    for (uint r = 0; r < count; r++) {
        const __global ${stored(TYPE)} *row = rows + stride * r;
        uint d = 0;
        for (; d + 8 <= columns; d += 8) {
% if TYPE == "float16":
            vstore8(vload_half8(0, row + d), 0, wide + ${HEAD} * r + d);
% else:
            vstore8(as_float8(convert_uint8(vload8(0, row + d)) << 16), 0, wide + ${HEAD} * r + d);
% endif
        }
        for (; d < columns; d++) wide[${HEAD} * r + d] = ${load(TYPE, "row", "d")};
    }
}
% endif

// tile[r][lane] = sum_d rows[r][d] kept[d][lane].
inline void products(float *tile, const float *kept, ${ROW} *rows, const ulong stride, const uint count,
                     const uint columns) {
    for (uint r = 0; r < count; r += ${TALL}) {
        // Rows beyond the end repeat the last one; the tile has room for them.
% for i in range(TALL):
        ${ROW} *row${i} = rows + stride * min(r + ${i}, count - 1);
% for v in range(2):
        float${WIDE} sum${i}_${v} = (float${WIDE})(0.0f);
% endfor
% endfor
        for (uint d = 0; d < columns; d++) {
% for v in range(2):
            const float${WIDE} kept${v} = vload${WIDE}(2 * d + ${v}, kept);
% endfor
% for i in range(TALL):
            const float${WIDE} value${i} = (float${WIDE})(row${i}[d]);
% for v in range(2):
            sum${i}_${v} += value${i} * kept${v};
% endfor
% endfor
        }
% for i in range(TALL):
% for v in range(2):
        vstore${WIDE}(sum${i}_${v}, 2 * (r + ${i}) + ${v}, tile);
% endfor
% endfor
    }
}

// result[c][lane] = shrink[lane] * result[c][lane] + sum_r rows[r][c] tile[r][lane].
inline void accumulate(float *result, const float *tile, ${ROW} *rows, const ulong stride, const uint count,
                       const uint columns, const float *shrink) {
    for (uint c = 0; c < columns; c += ${BROAD}) {
% for i in range(BROAD):
        const uint at${i} = min(c + ${i}, columns - 1);
% for v in range(2):
        float${WIDE} sum${i}_${v} = vload${WIDE}(${v}, shrink) * vload${WIDE}(2 * at${i} + ${v}, result);
% endfor
% endfor
        for (uint r = 0; r < count; r++) {
            ${ROW} *row = rows + stride * r;
% for v in range(2):
            const float${WIDE} weight${v} = vload${WIDE}(2 * r + ${v}, tile);
% endfor
% for i in range(BROAD):
            const float${WIDE} value${i} = (float${WIDE})(row[at${i}]);
% for v in range(2):
            sum${i}_${v} += value${i} * weight${v};
% endfor
% endfor
        }
        // Columns beyond the end repeat the last one, and write what it writes.
% for i in range(BROAD):
% for v in range(2):
        vstore${WIDE}(sum${i}_${v}, 2 * at${i} + ${v}, result);
% endfor
% endfor
    }
}

## A block of passing rows as floats: name and stride are what products and accumulate take.
<%def name="passing(name, rows, stride, columns)">
% if WIDEN:
        widen_rows(${name}_rows, ${rows}, ${stride}, count, ${columns});
        const ulong ${name}_stride = ${HEAD};
% else:
        const __global float *${name}_rows = ${rows};
        const ulong ${name}_stride = ${stride};
% endif
</%def>

## Scores in units of log2 in the tile. own: what is kept, "i" (queries) or "j" (keys).
<%def name="item_scores(own)">
        for (uint r = 0; r < count; r++) {
            const uint at = other0 + r;
% for v in V8:
            float8 score${v} = vload8(${len(V8)} * r + ${v}, tile) * scale2;
% endfor
% if MASK:
            float terms[LANES];
            for (uint lane = 0; lane < LANES; lane++) {
                const uint own = own0 + min(lane, own_count - 1);
<% i, j = ("own", "at") if own == "i" else ("at", "own") %>
                terms[lane] = mask_term(mask, mask_at + mask_place.w * ${i} + mask_stride * ${j});
            }
% for v in V8:
            score${v} += vload8(${v}, terms);
% endfor
% endif
            if (causal && ${"at > own0" if own == "i" else "own0 + LANES > at"}) {
                const int8 limit = (int8)((int)at - (int)own0);
% for v in V8:
<% late, early = ("limit", f"LANE_{v}")[:: 1 if own == "i" else -1] %>
                score${v} = select(score${v}, (float8)(-INFINITY), ${late} > ${early});
% endfor
            }
% for v in V8:
            vstore8(score${v}, ${len(V8)} * r + ${v}, tile);
% endfor
            ${caller.body()}
        }
</%def>

<%def name="item_drop(tile, own)">
% if DROPOUT:
            for (uint lane = 0; lane < LANES; lane++) {
<% i, j = ("own0 + lane", "other0 + r")[:: 1 if own == "i" else -1] %>
                ${tile}[LANES * r + lane] *= dropped(((ulong)bh * T + ${i}) * S + ${j}, seed, threshold, kept);
            }
% endif
</%def>

<%def name="item_begin(own_rows, item_heads)">
    const uint T = sizes.s0, S = sizes.s1, D = sizes.s2, V = sizes.s3, H = sizes.s4, share = sizes.s5;
    const bool causal = sizes.s6 != 0;
    const uint blocks = (${own_rows} + LANES - 1) / LANES;
    const uint outer = get_global_id(0) / blocks;
    const uint own0 = LANES * (get_global_id(0) - outer * blocks);
    const uint own_count = min(${own_rows} - own0, LANES);
    const uint b = outer / ${item_heads};
    float tile[${ROWS} * LANES];
</%def>

<%def name="clear(result)">
    float ${result}[${HEAD} * LANES];
    for (uint c = 0; c < ${len(V8) * HEAD}; c++) vstore8((float8)(0.0f), c, ${result});
</%def>

<%def name="finish(result, factor, columns)">
    for (uint c = 0; c < ${columns}; c++) {
% for v in V8:
        vstore8(vload8(${len(V8)} * c + ${v}, ${result}) * ${factor(v)}, ${len(V8)} * c + ${v}, ${result});
% endfor
    }
</%def>
