// CPU shape: a work-item computes m_per rows by n_per columns of the result. For each block of K, DEPTH cells, it copies its rows of b
// into panels, transposed, so that neighbouring columns lie side by side; then TILE_M rows of a at a time into a tile, and multiplies that
// by each panel with the sums in registers. A cell is a float of one element of K, or for "vnni" a word of four.
<%
VNNI = KIND == "vnni"
TILE_M = 6
VECTORS = 2 if VNNI or WIDTH == 8 else 4
PANEL = WIDTH * VECTORS
CELL = "uint" if VNNI else "float"
UNIT = 4 if VNNI else 1
V = f"float{WIDTH}"
I = f"int{WIDTH}"
%>
#define PANEL ${PANEL}

% if VNNI:
// Four bytes from k on, and zeros beyond kb.
inline uint cell(const __global char *p, const uint k, const uint kb) {
    uint word = 0;
    for (uint i = 0; i < 4; i++) word |= k + i < kb ? (uint)(uchar)p[k + i] << 8 * i : 0u;
    return word;
}

inline uint8 cells_8(const __global char *p) {
    return (uint8)(${", ".join(f"as_uint2(vload8({i}, p))" for i in range(4))});
}
% else:
inline float cell(const __global char *p, const uint k, const uint kb) { return (float)p[k]; }

inline float8 cells_8(const __global char *p) { return convert_float8(vload8(0, p)); }
% endif
// The instruction's left operand is without a sign: b + 128 stands for b, and 128 times a row's sum is taken off again.
<% PLACED = "{} ^ 0x80808080u" if VNNI else "{}" %>
// Rows n0 .. n0 + columns of b as a panel of [cells][PANEL], from k0 on; columns beyond are zeros.
inline void fill_panel(__local ${CELL} *panel, const __global char *b, const uint ldb, const uint n0, const uint columns, const uint k0,
                       const uint kb, const uint cells) {
    uint j = 0;
    for (; j + 8 <= columns; j += 8) {
% for e in range(8):
        const __global char *row${e} = b + (size_t)(n0 + j + ${e}) * ldb + k0;
% endfor
        uint k = 0;
        for (; ${UNIT} * (k + 8) <= kb; k += 8) {
% for e in range(8):
            const ${CELL}8 a${e} = cells_8(row${e} + ${UNIT} * k);
% endfor
            ${transpose_8(f"{CELL}8", lambda e, row: f"vstore8({PLACED.format(row)}, 0, panel + PANEL * (k + {e}) + j)")}
        }
        for (; k < cells; k++) {
% for e in range(8):
            panel[PANEL * k + j + ${e}] = ${PLACED.format(f"cell(row{e}, {UNIT} * k, kb)")};
% endfor
        }
    }
    for (; j < columns; j++) {
        const __global char *row = b + (size_t)(n0 + j) * ldb + k0;
        for (uint k = 0; k < cells; k++) panel[PANEL * k + j] = ${PLACED.format(f"cell(row, {UNIT} * k, kb)")};
    }
    for (; j < PANEL; j++) {
        for (uint k = 0; k < cells; k++) panel[PANEL * k + j] = 0;
    }
}

// Rows m0 .. m0 + rows of a as a tile of [TILE_M][DEPTH]. Rows beyond the end repeat the last one; their sums are not stored.
% if VNNI:
// surplus: what the panels' 128 more bring to each row's sums.
% endif
inline void fill_tile(__local ${CELL} *tile, ${"int *surplus, " if VNNI else ""}const __global char *a, const uint lda, const uint m0,
                      const uint rows, const uint k0, const uint kb, const uint cells) {
    for (uint i = 0; i < ${TILE_M}; i++) {
        const __global char *source = a + (size_t)(m0 + min(i, rows - 1)) * lda + k0;
        __local ${CELL} *target = tile + ${DEPTH} * i;
        uint k = 0;
% if VNNI:
        // The bytes' sum, each with 128 more, in halves of words.
        uint8 halves = (uint8)(0);
        for (; 4 * (k + 8) <= kb; k += 8) {
            const uint8 words = cells_8(source + 4 * k);
            vstore8(words, 0, target + k);
            const uint8 placed = words ^ 0x80808080u;
            halves += (placed & 0x00ff00ffu) + (placed >> 8 & 0x00ff00ffu);
        }
        uint total = 0;
        for (; k < cells; k++) {
            const uint word = cell(source, 4 * k, kb);
            target[k] = word;
            const uint placed = word ^ 0x80808080u;
            total += (placed & 0xffu) + (placed >> 8 & 0xffu) + (placed >> 16 & 0xffu) + (placed >> 24);
        }
        halves = (halves & 0xffffu) + (halves >> 16);
        total += ${" + ".join(f"halves.s{e}" for e in range(8))};
        surplus[i] = 128 * ((int)total - 512 * (int)cells);
% else:
        for (; k + 8 <= kb; k += 8) vstore8(cells_8(source + k), 0, target + k);
        for (; k < kb; k++) target[k] = cell(source, k, kb);
% endif
    }
}

% if VNNI:
#include "_int8_vnni.cl"
% else:
// sums [TILE_M][PANEL] = tile @ panel.
inline void multiply_tile(__local int *sums, const __local float *tile, const __local float *panel, const uint cells) {
% for i in range(TILE_M):
% for v in range(VECTORS):
    ${V} sum${i}_${v} = (${V})(0.0f);
% endfor
% endfor
    for (uint k = 0; k < cells; k++) {
% for v in range(VECTORS):
        const ${V} b${v} = *(const __local ${V} *)(panel + PANEL * k + ${WIDTH * v});
% endfor
% for i in range(TILE_M):
        const ${V} a${i} = (${V})(tile[${DEPTH * i} + k]);
% for v in range(VECTORS):
        sum${i}_${v} += a${i} * b${v};
% endfor
% endfor
    }
    // Whole numbers below 2^22 in magnitude become int by their place beside 1.5 * 2^23, without a conversion as wide as this.
% for i in range(TILE_M):
% for v in range(VECTORS):
    *(__local ${I} *)(sums + PANEL * ${i} + ${WIDTH * v}) = as_${I}(sum${i}_${v} + 12582912.0f) - 0x4b400000;
% endfor
% endfor
}
% endif

// A row of a block's sums to its place.
inline void put_row(const __local int *sums, __global int *target, const __global float *col, const float own, const uint columns,
                    const uint scales, const bool first, const bool last) {
    uint j = 0;
    for (; j + 8 <= columns; j += 8) {
        int8 sum = vload8(0, sums + j);
        ${due("sum", "vload8(0, target + j)", "vload8(0, col + j)", "8")}
        vstore8(sum, 0, target + j);
    }
    for (; j < columns; j++) {
        int sum = sums[j];
        ${due("sum", "target[j]", "col[j]", "")}
        target[j] = sum;
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void matmul_int8(${parameters()}, const uint m_per, const uint n_per) {
    __local ${CELL} panels[${DEPTH * TILE_N}] __attribute__((aligned(64)));
    __local ${CELL} tile[${DEPTH * TILE_M}] __attribute__((aligned(64)));
    __local int sums[PANEL * ${TILE_M}] __attribute__((aligned(64)));
% if VNNI:
    int surplus[${TILE_M}];
% endif
    if (gated && gate[2] == 0) return;
    const uint n0 = get_global_id(0) * n_per;
    const uint n1 = min(n0 + n_per, N);
    const uint m0 = get_global_id(1) * m_per;
    const uint m1 = min(m0 + m_per, M);
    for (uint k0 = 0; k0 < K; k0 += ${DEPTH * UNIT}) {
        const uint kb = min(K - k0, ${DEPTH * UNIT}u);
        const uint cells = ${"(kb + 15) / 16 * 4" if VNNI else "kb"};
        const bool first = k0 == 0;
        const bool last = k0 + kb == K;
        for (uint n = n0; n < n1; n += PANEL) {
            fill_panel(panels + ${DEPTH} * (n - n0), b + b0, ldb, n, min(n1 - n, (uint)PANEL), k0, kb, cells);
        }
        for (uint m = m0; m < m1; m += ${TILE_M}) {
            const uint rows = min(m1 - m, ${TILE_M}u);
            fill_tile(tile, ${"surplus, " if VNNI else ""}a + a0, lda, m, rows, k0, kb, cells);
            for (uint n = n0; n < n1; n += PANEL) {
                const uint columns = min(n1 - n, (uint)PANEL);
                multiply_tile(sums, tile, ${"surplus, " if VNNI else ""}panels + ${DEPTH} * (n - n0), cells);
                for (uint i = 0; i < rows; i++) {
                    const float own = scales ? row[row0 + m + i] : 1.0f;
                    put_row(sums + PANEL * i, out + (size_t)(m + i) * N + n, col + n, own, columns, scales, first, last);
                }
            }
        }
    }
}
