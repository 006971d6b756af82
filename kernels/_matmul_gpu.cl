// GPU shape: a work-group of 16 x 16 items computes a TILE x TILE block, an item TILE/16 x TILE/16 of it. Tiles of TILE_K columns of a
// (transposed) and rows of b (decoded) wait in local memory.
<%
PER = TILE // 16
LOADS = TILE * TILE_K // (4 * 256)
PITCH = TILE + 4
%>
inline float4 load_4(const __global float *p, uint left) {
    if (left >= 4) return ${"*(const __global float4 *)p" if ALIGNED else "vload4(0, p)"};
    return (float4)(left > 0 ? p[0] : 0.0f, left > 1 ? p[1] : 0.0f, left > 2 ? p[2] : 0.0f, 0.0f);
}

<%def name="scatter(tile, k, m, value)">
            ${tile}[(${k}) * ${PITCH} + ${m}] = ${value}.x;
            ${tile}[(${k} + 1) * ${PITCH} + ${m}] = ${value}.y;
            ${tile}[(${k} + 2) * ${PITCH} + ${m}] = ${value}.z;
            ${tile}[(${k} + 3) * ${PITCH} + ${m}] = ${value}.w;
</%def>

__kernel __attribute__((reqd_work_group_size(16, 16, 1)))
void matmul(const __global float *left_operand, const __global void *right, const __global float *scale, __global float *out,
            const ulong first, const uint M, const uint N, const uint K, const uint lda, const uint ldb, const uint m_per) {
    __local float tile_a[${TILE_K * PITCH}] __attribute__((aligned(16)));
    __local float tile_b[${TILE_K * PITCH}] __attribute__((aligned(16)));
    const uint x = get_local_id(0);
    const uint y = get_local_id(1);
    const uint item = y * 16 + x;
    const __global float *a = left_operand + first;
    const uint n0 = get_group_id(0) * ${TILE};
    const uint m0 = get_group_id(1) * ${TILE};
% for i in range(PER):
% for v in range(PER // 4):
    float4 sum${i}_${v} = (float4)(0.0f);
% endfor
% endfor
    for (uint k0 = 0; k0 < K; k0 += ${TILE_K}) {
        #pragma unroll
        for (uint load = 0; load < ${LOADS}; load++) {
            const uint unit = item + 256 * load;
% if LEFT == "rows":
            const uint am = unit / ${TILE_K // 4};
            const uint ak = unit % ${TILE_K // 4} * 4;
            float4 va = (float4)(0.0f);
            if (m0 + am < M && k0 + ak < K) va = load_4(a + (size_t)(m0 + am) * lda + k0 + ak, K - k0 - ak);
            ${scatter("tile_a", "ak", "am", "va")}
% else:
            const uint ak = unit / ${TILE // 4};
            const uint am = unit % ${TILE // 4} * 4;
            float4 va = (float4)(0.0f);
            if (k0 + ak < K && m0 + am < M) va = load_4(a + (size_t)(k0 + ak) * lda + m0 + am, M - m0 - am);
            *(__local float4 *)(tile_a + ak * ${PITCH} + am) = va;
% endif
            float4 vb = (float4)(0.0f);
% if RIGHT == "counter_t":
            const uint bn = unit / ${TILE_K // 4};
            const uint bk = unit % ${TILE_K // 4} * 4;
            if (n0 + bn < N && k0 + bk < K) {
                const uint n = ldb;
                const __global uchar *row = (const __global uchar *)right + (size_t)(n0 + bn) * (${ROW_BYTES[PACKED]});
                vb = scale[n0 + bn] * code_ternary_4(word_centred(load_word_4(row, (k0 + bk) / 4, n)));
                // Columns beyond the row's end meet zeros of a, but their codes are not weights.
            }
            ${scatter("tile_b", "bk", "bn", "vb")}
% else:
            const uint bk = unit / ${TILE // 4};
            const uint bn = unit % ${TILE // 4} * 4;
            if (k0 + bk < K && n0 + bn < N) {
% if RIGHT == "counter":
                const uint n = ldb;
                const __global uchar *row = (const __global uchar *)right + (size_t)(k0 + bk) * (${ROW_BYTES[PACKED]});
                vb = scale[k0 + bk] * code_ternary_4(word_centred(load_word_4(row, (n0 + bn) / 4, n)));
% else:
                vb = load_4((const __global float *)right + (size_t)(k0 + bk) * ldb + n0 + bn, N - n0 - bn);
% endif
            }
            *(__local float4 *)(tile_b + bk * ${PITCH} + bn) = vb;
% endif
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint k = 0; k < ${TILE_K}; k++) {
% for v in range(PER // 4):
            // Quarters 64 apart, so that neighbouring items read neighbouring words.
            const float4 left${v} = *(const __local float4 *)(tile_a + k * ${PITCH} + ${64 * v} + 4 * y);
            const float4 b${v} = *(const __local float4 *)(tile_b + k * ${PITCH} + ${64 * v} + 4 * x);
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
        const uint m = m0 + ${64 * (i // 4)} + 4 * y + ${i % 4};
        if (m < M) {
            __global float *target = out + (size_t)m * N;
% for v in range(PER // 4):
            const uint column${v} = n0 + ${64 * v} + 4 * x;
            if (column${v} + 4 <= N) {
                vstore4(sum${i}_${v}, 0, target + column${v});
            } else {
                if (column${v} < N) target[column${v}] = sum${i}_${v}.x;
                if (column${v} + 1 < N) target[column${v} + 1] = sum${i}_${v}.y;
                if (column${v} + 2 < N) target[column${v} + 2] = sum${i}_${v}.z;
            }
% endfor
        }
    }
% endfor
}
