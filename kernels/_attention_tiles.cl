// What the GPU shape of attention is made of (_attention_gpu.cl). A group of 128 items keeps 64 rows; 64 rows of the
// other side pass by at a time. An item owns a score tile of 8 kept rows (4y and 32 + 4y onwards) by 4 passing ones (4x
// onwards), x < 16, y < 8, as s<passing>_<half>, a float4 of kept rows; and the same rows of the result by SLICE/16
// columns. Rows of both sides come DEPTH columns at a time through `stage`, transposed for the scores and as they are
// for the result; the tile of weights between the two products waits in `weights`.
//
// A transposed tile [k][64] holds the float4 of rows 4g at group g ^ (k/4 & 7): without that, items that write a
// transposed row, or the 16 items of a row of the score tile, would meet in one bank.
<%
W = 4 if SLICE % 64 == 0 else 2
UNITS = SLICE // (16 * W)
COLUMNS = UNITS * W
TILE = [(c, v) for c in range(4) for v in range(2)]
RESULT = [(c, v) for c in range(COLUMNS) for v in range(2)]
%>
#define ROWS 64u

inline float4 load_4(const __global ${stored(TYPE)} *p, const uint left) {
    if (left >= 4) {
% if TYPE == "float32":
        return ${"*(const __global float4 *)p" if ALIGNED else "vload4(0, p)"};
% elif TYPE == "float16":
        return vload_half4(0, p);
% else:
        return as_float4(convert_uint4(${"*(const __global ushort4 *)p" if ALIGNED else "vload4(0, p)"}) << 16);
% endif
    }
    return (float4)(left > 0 ? ${load(TYPE, "p", "0")} : 0.0f, left > 1 ? ${load(TYPE, "p", "1")} : 0.0f,
                    left > 2 ? ${load(TYPE, "p", "2")} : 0.0f, 0.0f);
}

inline void store_${W}(__global ${stored(TYPE)} *p, const float${W} value, const uint left) {
% if TYPE != "bfloat16":
    if (left >= ${W}) {
        ${f"vstore{W}(value, 0, p)" if TYPE == "float32" else f"vstore_half{W}_rte(value, 0, p)"};
        return;
    }
% endif
% for e in range(W):
    if (left > ${e}) ${store(TYPE, "p", e, f"value.s{e}")};
% endfor
}

// Columns d0 onwards, DEPTH of them, of up to 64 rows; zeros beyond the rows and columns that there are.
inline void stage_transposed(__local float *target, const __global ${stored(TYPE)} *rows, const ulong stride,
                             const uint count, const uint d0, const uint columns, const uint item) {
    #pragma unroll
    for (uint load = 0; load < ${64 * DEPTH // 4 // 128}; load++) {
        const uint unit = item + 128 * load;
        const uint row = unit / ${DEPTH // 4};
        const uint quad = unit % ${DEPTH // 4};
        const uint d = d0 + 4 * quad;
        float4 value = (float4)(0.0f);
        if (row < count && d < columns) value = load_4(rows + row * stride + d, columns - d);
        __local float *to = target + 256 * quad + 4 * (row / 4 ^ (quad & 7)) + row % 4;
        to[0] = value.x;
        to[64] = value.y;
        to[128] = value.z;
        to[192] = value.w;
    }
}

// Columns c0 onwards, SLICE of them, of up to DEPTH rows, as they are.
inline void stage_rows(__local float *target, const __global ${stored(TYPE)} *rows, const ulong stride, const uint count,
                       const uint c0, const uint columns, const uint item) {
    #pragma unroll
    for (uint load = 0; load < ${DEPTH * SLICE // 4 // 128}; load++) {
        const uint unit = item + 128 * load;
        const uint row = unit / ${SLICE // 4};
        const uint c = c0 + 4 * (unit - row * ${SLICE // 4});
        float4 value = (float4)(0.0f);
        if (row < count && c < columns) value = load_4(rows + row * stride + c, columns - c);
        *(__local float4 *)(target + 4 * unit) = value;
    }
}

<%def name="group_begin()">
    __local float stage[${DEPTH * 128}] __attribute__((aligned(16)));
    __local float weights[64 * 64] __attribute__((aligned(16)));
    const uint T = sizes.s0, S = sizes.s1, D = sizes.s2, V = sizes.s3, H = sizes.s4, share = sizes.s5;
    const bool causal = sizes.s6 != 0;
    const uint item = get_local_id(0);
    const uint x = item % 16;
    const uint y = item / 16;
</%def>

## name<c>_<half> = sum over columns of (kept row) * (passing row), float4s of kept rows.
<%def name="tile_products(name, kept, kept_stride, kept_count, passing, passing_stride, passing_count, columns)">
% for c, v in TILE:
        float4 ${name}${c}_${v} = (float4)(0.0f);
% endfor
        for (uint d0 = 0; d0 < ${columns}; d0 += ${DEPTH}) {
            stage_transposed(stage, ${kept}, ${kept_stride}, ${kept_count}, d0, ${columns}, item);
            stage_transposed(stage + ${64 * DEPTH}, ${passing}, ${passing_stride}, ${passing_count}, d0, ${columns}, item);
            barrier(CLK_LOCAL_MEM_FENCE);
            #pragma unroll 2
            for (uint quad = 0; quad < ${DEPTH // 4}; quad++) {
                const __local float *left = stage + 256 * quad + 4 * (y ^ (quad & 7));
                const __local float *right = stage + ${64 * DEPTH} + 256 * quad + 4 * (x ^ (quad & 7));
                #pragma unroll
                for (uint e = 0; e < 4; e++) {
                    const float4 left0 = *(const __local float4 *)(left + 64 * e);
                    const float4 left1 = *(const __local float4 *)(left + 64 * e + 32);
                    const float4 along = *(const __local float4 *)(right + 64 * e);
% for c, v in TILE:
                    ${name}${c}_${v} += left${v} * along.s${c};
% endfor
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
</%def>

## What the item's tile weighs, for all items to read.
<%def name="publish(name)">
% for c, v in TILE:
        *(__local float4 *)(weights + 64 * (4 * x + ${c}) + 4 * (y ^ (x & 7)) + ${32 * v}) = ${name}${c}_${v};
% endfor
        barrier(CLK_LOCAL_MEM_FENCE);
</%def>

## result<column>_<half> += sum over passing rows of weight * (passing row), for columns from c0.
<%def name="tile_accumulate(result, passing, passing_stride, passing_count, columns)">
        for (uint r0 = 0; r0 < ROWS; r0 += ${DEPTH}) {
            stage_rows(stage, ${passing} + r0 * ${passing_stride}, ${passing_stride},
                       ${passing_count} - min(r0, ${passing_count}), c0, ${columns}, item);
            barrier(CLK_LOCAL_MEM_FENCE);
            #pragma unroll 8
            for (uint r = 0; r < ${DEPTH}; r++) {
                const __local float *left = weights + 64 * (r0 + r) + 4 * (y ^ ((r0 + r) / 4 & 7));
                const float4 left0 = *(const __local float4 *)left;
                const float4 left1 = *(const __local float4 *)(left + 32);
% for u in range(UNITS):
                const float${W} along${u} = *(const __local float${W} *)(stage + ${SLICE} * r + ${16 * W * u} + ${W} * x);
% endfor
% for c, v in RESULT:
                ${result}${c}_${v} += left${v} * along${c // W}.s${c % W};
% endfor
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
</%def>

<%def name="write_result(result, target, place, count, columns)">
% for v in range(2):
% for e in range(4):
    if (own0 + 4 * y + ${32 * v + e} < ${count}) {
        __global ${stored(TYPE)} *row = ${target} + ${place}.w * (own0 + 4 * y + ${32 * v + e});
% for u in range(UNITS):
        {
            const uint c = c0 + ${16 * W * u} + ${W} * x;
            const float${W} value = (float${W})(${", ".join(f"{result}{W * u + w}_{v}.s{e}" for w in range(W))});
            if (c < ${columns}) store_${W}(row + c, value, ${columns} - c);
        }
% endfor
    }
% endfor
% endfor
</%def>

## Scores in units of log2 from the products s; -infinity for what is forbidden. own: what is kept, "i" for queries or "j"
## for keys.
<%def name="tile_scores(own)">
<%
    def pair(c, v, e):
        kept, passing = f"(own0 + 4 * y + {32 * v + e})", f"(other0 + 4 * x + {c})"
        return (kept, passing) if own == "i" else (passing, kept)
%>
% for c, v in TILE:
        s${c}_${v} *= scale2;
% endfor
% if MASK:
% for c, v in TILE:
% for e in range(4):
<% i, j = pair(c, v, e) %>
        s${c}_${v}.s${e} += mask_term(mask, mask_at + mask_place.w * min(${i}, T - 1) + mask_stride * min(${j}, S - 1));
% endfor
% endfor
% endif
<% LIMIT, LATE_J, LATE_I = ("S", "other0", "own0") if own == "i" else ("T", "own0", "other0") %>
        if (other0 + ROWS > ${LIMIT} || (causal && ${LATE_J} + ROWS > ${LATE_I})) {
            // Bits for || and &&, which end Oclgrind where the compiler makes one vector of four of them.
% for c, v in TILE:
% for e in range(4):
<% i, j = pair(c, v, e) %>
            if (${f"({j} >= S)" if own == "i" else f"({i} >= T)"} | (causal & (${j} > ${i}))) s${c}_${v}.s${e} = -INFINITY;
% endfor
% endfor
        }
</%def>

<%def name="tile_drop(name, own)">
% if DROPOUT:
% for c, v in TILE:
        ${name}${c}_${v} *= (float4)(
% for e in range(4):
<% i, j = (f"(own0 + 4 * y + {32 * v + e})", f"(other0 + 4 * x + {c})")[:: 1 if own == "i" else -1] %>
            dropped(((ulong)bh * T + ${i}) * S + ${j}, seed, threshold, kept)${");" if e == 3 else ","}
% endfor
% endfor
% endif
</%def>
