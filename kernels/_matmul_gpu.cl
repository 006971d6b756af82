// GPU shape: a work-group of SIDE x SIDE items computes a TILE x TILE block, an item TILE/SIDE x TILE/SIDE of it. Tiles of TILE_K
// columns of a (transposed) and rows of b (decoded, transposed where needed) wait in local memory.
<%
PER = TILE // SIDE
LOADS = TILE * TILE_K // (4 * SIDE * SIDE)
PITCH = TILE + 4
%>
<%def name="bounded(name, t)">
// Up to four elements from i, and zeros for what lies beyond.
inline float4 ${name}_within(const __global ${stored(t)} *p, const size_t i, const uint left) {
    if (left >= 4) return ${name}_4(p, i);
    return (float4)(left > 0 ? ${name}_1(p, i) : 0.0f, left > 1 ? ${name}_1(p, i + 1) : 0.0f, left > 2 ? ${name}_1(p, i + 2) : 0.0f, 0.0f);
}
</%def>
<%def name="weights_4(q)">${f"cached_group(row, {q}, n)" if CACHED else f"code_ternary_4(word_centred(load_word_4(row, {q}, n)))"}</%def>
% if CACHED:
// Group q of four weights of a cached row, zeros beyond its end.
inline float4 cached_group(const __global ${RIGHT_STORED} *row, const uint q, const uint n) {
    const uint j = 4 * q;
    if (j + 4 <= n) return cached_4(row, j);
    return (float4)(cached_1(row, j), j + 1 < n ? cached_1(row, j + 1) : 0.0f, j + 2 < n ? cached_1(row, j + 2) : 0.0f, 0.0f);
}
% endif
${bounded("left", LEFT_TYPE)}
% if DENSE:
${bounded("right", RIGHT_TYPE)}
% endif
<%def name="scatter(tile, k, m, value)">
            ${tile}[(${k}) * ${PITCH} + ${m}] = ${value}.x;
            ${tile}[(${k} + 1) * ${PITCH} + ${m}] = ${value}.y;
            ${tile}[(${k} + 2) * ${PITCH} + ${m}] = ${value}.z;
            ${tile}[(${k} + 3) * ${PITCH} + ${m}] = ${value}.w;
</%def>
__kernel __attribute__((reqd_work_group_size(${SIDE}, ${SIDE}, 1)))
void matmul(${parameters()}) {
    __local float tile_a[${TILE_K * PITCH}] __attribute__((aligned(16)));
    __local float tile_b[${TILE_K * PITCH}] __attribute__((aligned(16)));
    const uint x = get_local_id(0);
    const uint y = get_local_id(1);
    const uint item = y * ${SIDE} + x;
    const uint n0 = get_group_id(0) * ${TILE};
    const uint m0 = get_group_id(1) * ${TILE};
    ${begin()}
% for i in range(PER):
% for v in range(PER // 4):
    float4 sum${i}_${v} = (float4)(0.0f);
% endfor
% endfor
    for (uint k0 = k_first; k0 < k_last; k0 += ${TILE_K}) {
        #pragma unroll
        for (uint load = 0; load < ${LOADS}; load++) {
            const uint unit = item + ${SIDE * SIDE} * load;
% if LEFT == "rows":
            const uint am = unit / ${TILE_K // 4};
            const uint ak = unit % ${TILE_K // 4} * 4;
            float4 va = (float4)(0.0f);
            if (m0 + am < M && k0 + ak < k_last) va = left_within(left, (size_t)(m0 + am) * lda + k0 + ak, k_last - k0 - ak);
            ${scatter("tile_a", "ak", "am", "va")}
% else:
            const uint ak = unit / ${TILE // 4};
            const uint am = unit % ${TILE // 4} * 4;
            float4 va = (float4)(0.0f);
            if (k0 + ak < k_last && m0 + am < M) va = left_within(left, (size_t)(k0 + ak) * lda + m0 + am, M - m0 - am);
            *(__local float4 *)(tile_a + ak * ${PITCH} + am) = va;
% endif
            float4 vb = (float4)(0.0f);
% if BY_COLUMN:
            const uint bn = unit / ${TILE_K // 4};
            const uint bk = unit % ${TILE_K // 4} * 4;
            if (n0 + bn < N && k0 + bk < k_last) {
% if not DENSE:
                const uint n = ldb;
                const __global ${RIGHT_STORED} *row = right + (size_t)(n0 + bn) * (${ROW});
                vb = scale[n0 + bn] * ${weights_4("(k0 + bk) / 4")};
                // Columns beyond the row's end meet zeros of a, but their codes are not weights.
% else:
                vb = right_within(right, (size_t)(n0 + bn) * ldb + k0 + bk, k_last - k0 - bk);
% endif
            }
            ${scatter("tile_b", "bk", "bn", "vb")}
% else:
            const uint bk = unit / ${TILE // 4};
            const uint bn = unit % ${TILE // 4} * 4;
            if (k0 + bk < k_last && n0 + bn < N) {
% if not DENSE:
                const uint n = ldb;
                const __global ${RIGHT_STORED} *row = right + (size_t)(k0 + bk) * (${ROW});
                vb = scale[k0 + bk] * ${weights_4("(n0 + bn) / 4")};
% else:
                vb = right_within(right, (size_t)(k0 + bk) * ldb + n0 + bn, N - n0 - bn);
% endif
            }
            *(__local float4 *)(tile_b + bk * ${PITCH} + bn) = vb;
% endif
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint k = 0; k < ${TILE_K}; k++) {
% for v in range(PER // 4):
            // Vectors of an item lie 4 * SIDE apart, so that neighbouring items read neighbouring words.
            const float4 left${v} = *(const __local float4 *)(tile_a + k * ${PITCH} + ${4 * SIDE * v} + 4 * y);
            const float4 b${v} = *(const __local float4 *)(tile_b + k * ${PITCH} + ${4 * SIDE * v} + 4 * x);
% endfor
% for i in range(PER):
% for v in range(PER // 4):
            sum${i}_${v} += left${i // 4}.s${i % 4} * b${v};
% endfor
% endfor
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
% for i in range(PER):
    {
        const uint m = m0 + ${4 * SIDE * (i // 4)} + 4 * y + ${i % 4};
        if (m < M) {
            __global ${stored(OUT_TYPE)} *target = out + (size_t)m * N;
% for v in range(PER // 4):
            const uint column${v} = n0 + ${4 * SIDE * v} + 4 * x;
% if EPILOGUE:
            sum${i}_${v} *= alpha;
            if (beta != 0.0f && column${v} < N) {
                const size_t at = m * add_m + column${v} * add_n;
                sum${i}_${v}.x += beta * add_1(add, at);
                if (column${v} + 1 < N) sum${i}_${v}.y += beta * add_1(add, at + add_n);
                if (column${v} + 2 < N) sum${i}_${v}.z += beta * add_1(add, at + 2 * add_n);
                if (column${v} + 3 < N) sum${i}_${v}.w += beta * add_1(add, at + 3 * add_n);
            }
% endif
            if (column${v} + 4 <= N) {
                out_store_4(sum${i}_${v}, target, column${v});
            } else {
                if (column${v} < N) out_store_1(sum${i}_${v}.x, target, column${v});
                if (column${v} + 1 < N) out_store_1(sum${i}_${v}.y, target, column${v} + 1);
                if (column${v} + 2 < N) out_store_1(sum${i}_${v}.z, target, column${v} + 2);
            }
% endfor
        }
    }
% endfor
}
