// CPU shape: a work-item computes m_per rows by 16 columns of the result. For each block of K it fills a [TILE_K, 16] panel of the
// right operand (decoded, transposed where needed), then walks its rows TILE_M at a time with the products in registers.
<% VECTORS = 2 %>
#define PANEL ${8 * VECTORS}

inline void fill_panel(__local float *panel, const __global void *right, const __global float *scale, const uint ldb,
                       const uint n0, const uint N, const uint k0, const uint kb) {
    const uint columns = min(N - n0, (uint)PANEL);
% if RIGHT == "dense":
    const __global float *b = (const __global float *)right;
    for (uint k = 0; k < kb; k++) {
        const __global float *source = b + (size_t)(k0 + k) * ldb + n0;
        if (columns == PANEL) {
% for v in range(VECTORS):
            vstore8(vload8(${v}, source), ${v}, panel + PANEL * k);
% endfor
        } else {
            for (uint j = 0; j < PANEL; j++) panel[PANEL * k + j] = j < columns ? source[j] : 0.0f;
        }
    }
% elif RIGHT == "counter":
    // Row k of the state gives the panel's row k; ldb is the length of a state row in weights.
    const uint n = ldb;
    for (uint k = 0; k < kb; k++) {
        const __global uchar *row = (const __global uchar *)right + (size_t)(k0 + k) * (${ROW_BYTES[PACKED]});
        const float s = scale[k0 + k];
        if (columns == PANEL) {
% for v in range(VECTORS):
            {
                const uint j = n0 + ${8 * v};
                const uint8 codes = ${"cc_load_8(row + j / 4 * 3)" if PACKED else "convert_uint8(vload8(0, row + j))"};
                vstore8(s * code_ternary_8(${centred("codes", 8)}), ${v}, panel + PANEL * k);
            }
% endfor
        } else {
            for (uint j = 0; j < PANEL; j++) {
                float w = 0.0f;
                if (j < columns) {
                    const uint code = ${"cc_unpack_1(row, n0 + j)" if PACKED else "row[n0 + j]"};
                    w = s * code_ternary_1(${centred("code", "")});
                }
                panel[PANEL * k + j] = w;
            }
        }
    }
% else:
    // Row j of the state gives the panel's column j; the row scale is applied to the finished sums.
    const uint n = ldb;
    for (uint j = 0; j < PANEL; j++) {
        if (j >= columns) {
            for (uint k = 0; k < kb; k++) panel[PANEL * k + j] = 0.0f;
            continue;
        }
        const __global uchar *row = (const __global uchar *)right + (size_t)(n0 + j) * (${ROW_BYTES[PACKED]});
        uint k = 0;
        for (; k + 8 <= kb; k += 8) {
            const uint at = k0 + k;
            const uint8 codes = ${"cc_load_8(row + at / 4 * 3)" if PACKED else "convert_uint8(vload8(0, row + at))"};
            const float8 t = code_ternary_8(${centred("codes", 8)});
% for e in range(8):
            panel[PANEL * (k + ${e}) + j] = t.s${e};
% endfor
        }
        for (; k < kb; k++) {
            const uint code = ${"cc_unpack_1(row, k0 + k)" if PACKED else "row[k0 + k]"};
            panel[PANEL * k + j] = code_ternary_1(${centred("code", "")});
        }
    }
% endif
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void matmul(const __global float *left_operand, const __global void *right, const __global float *scale, __global float *out,
            const ulong first, const uint M, const uint N, const uint K, const uint lda, const uint ldb, const uint m_per) {
    __local float panel[${TILE_K} * PANEL];
    const __global float *a = left_operand + first;
    const uint n0 = get_global_id(0) * PANEL;
    const uint begin = get_global_id(1) * m_per;
    const uint last = min(begin + m_per, M);
    const uint columns = min(N - n0, (uint)PANEL);
% if RIGHT == "counter_t":
% for v in range(VECTORS):
    float8 column_scale${v} = (float8)(0.0f);
% endfor
    {
        float values[PANEL];
        for (uint j = 0; j < PANEL; j++) values[j] = j < columns ? scale[n0 + j] : 0.0f;
% for v in range(VECTORS):
        column_scale${v} = vload8(${v}, values);
% endfor
    }
% endif
    for (uint k0 = 0; k0 < K || k0 == 0; k0 += ${TILE_K}) {
        const uint kb = min(K - k0, ${TILE_K}u);
        fill_panel(panel, right, scale, ldb, n0, N, k0, kb);
        for (uint m = begin; m < last; m += ${TILE_M}) {
            // Rows beyond the end repeat the last one, and are not stored.
% for i in range(TILE_M):
            const uint row${i} = min(m + ${i}, last - 1);
            const __global float *a${i} = a + ${f"(size_t)row{i} * lda + k0" if LEFT == "rows" else f"(size_t)k0 * lda + row{i}"};
% for v in range(VECTORS):
            float8 sum${i}_${v} = (float8)(0.0f);
% endfor
% endfor
            for (uint k = 0; k < kb; k++) {
% for v in range(VECTORS):
                const float8 b${v} = vload8(${v}, panel + PANEL * k);
% endfor
% for i in range(TILE_M):
                const float8 left${i} = (float8)(a${i}[${"k" if LEFT == "rows" else "(size_t)k * lda"}]);
% for v in range(VECTORS):
                sum${i}_${v} += left${i} * b${v};
% endfor
% endfor
            }
% for i in range(TILE_M):
            if (m + ${i} < last) {
                __global float *target = out + (size_t)(m + ${i}) * N + n0;
                if (columns == PANEL) {
% for v in range(VECTORS):
                    if (k0 > 0) sum${i}_${v} += vload8(${v}, target);
% if RIGHT == "counter_t":
                    if (k0 + kb >= K) sum${i}_${v} *= column_scale${v};
% endif
                    vstore8(sum${i}_${v}, ${v}, target);
% endfor
                } else {
                    float values[PANEL];
                    float scales[PANEL];
% for v in range(VECTORS):
                    vstore8(sum${i}_${v}, ${v}, values);
                    vstore8(${f"column_scale{v}" if RIGHT == "counter_t" else "(float8)(1.0f)"}, ${v}, scales);
% endfor
                    for (uint j = 0; j < columns; j++) {
                        const float sum = values[j] + (k0 > 0 ? target[j] : 0.0f);
                        target[j] = (k0 + kb >= K) ? sum * scales[j] : sum;
                    }
                }
            }
% endfor
        }
    }
}
