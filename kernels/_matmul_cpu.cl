// CPU shape: a work-item computes m_per rows by n_per columns of the result. For each TILE_K of K it copies its columns of the
// right operand into panels (decoded, transposed, widened to float), then its rows of the left operand, TILE_ROWS at a time, into
// tiles, and multiplies a tile of TILE_M rows by a panel with the sums in registers. So every inner loop reads unit strides, and
// matrices are read once in about two hundred rows and columns of the result.
//
// Of a large operand even these reads cost: each row lies in a page of its own, and more pages than a processor remembers. Such
// operands are packed first: pack_panels writes the right one's panels one behind the other, RIGHT "panels" [N/PANEL][K][PANEL],
// and pack_tiles the left one's tiles as an item would, TILED [M/TILE_ROWS][K/TILE_K][tiles].
//
// Sums between blocks of K wait in local memory where HELD_ROWS rows of the item fit (dense), in `out` itself where an item has
// more rows, to pay for decoding its panels (counter).
<%
TILE_M = 6
VECTORS = 4 if WIDTH == 16 else 2
PANEL = WIDTH * VECTORS
CHUNKS = -(-TILE_M // 4)
# The last chunk of a tile of columns spills over what the next turn writes.
TILE_A = TILE_K * TILE_M + 4 * CHUNKS - TILE_M
SUM_ROWS = HELD_ROWS if DENSE else TILE_M
SUM_COLUMNS = TILE_N if DENSE else PANEL
V = f"float{WIDTH}"
PANEL_SPACE = "__local" if LEFT else "__global"
TILE_SPACE = "__global" if TILED or not RIGHT else "__local"
BLOCK_A = TILE_ROWS // TILE_M * TILE_A
%>
#define PANEL ${PANEL}
#define TILE_A ${TILE_A}

<%def name="row_of(j, e)">
% if DENSE:
const __global ${stored(RIGHT_TYPE)} *row${e} = right + (size_t)(${j}) * ldb + k0;
% else:
const __global ${RIGHT_STORED} *row${e} = right + (size_t)(${j}) * (${ROW.replace("n", "ldb")});
% endif
</%def>
<%
# Eight elements, and one, of row e from k on: of b, or the ternary weights of a state row.
def eight_of(e):
    if DENSE:
        return f"right_8(row{e}, k)"
    if CACHED:
        return f"cached_8(row{e}, k0 + k)"
    codes = f"cc_load_8(row{e} + (k0 + k) / 4 * 3)" if PACKED else f"convert_uint8(vload8(0, row{e} + k0 + k))"
    return f"code_ternary_8(convert_float8(as_int8({codes})) - {3 * C - 2}.0f)"

def one_of(e):
    if DENSE:
        return f"right_1(row{e}, k)"
    if CACHED:
        return f"cached_1(row{e}, k0 + k)"
    code = f"cc_unpack_1(row{e}, k0 + k)" if PACKED else f"row{e}[k0 + k]"
    return f"code_ternary_1(convert_float(as_int((uint){code})) - {3 * C - 2}.0f)"
%>
% if RIGHT:
// Columns n0 .. n0 + columns of rows k0 .. k0 + kb as panels of [TILE_K][PANEL]; zeros fill the last panel.
inline void fill_panel(${PANEL_SPACE} float *panel, const __global ${RIGHT_STORED} *right, ${"" if DENSE else "const __global float *scale, "}const uint ldb,
                       const uint n0, const uint columns, const uint k0, const uint kb) {
% if RIGHT == "panels":
    // Whole panels, padded with zeros; ldb is their length.
    const size_t source = ((size_t)(n0 / PANEL) * ldb + k0) * PANEL;
    for (uint i = 0; i < kb * PANEL; i += 8) vstore8(right_8(right, source + i), 0, panel + i);
% elif RIGHT == "dense":
    for (uint k = 0; k < kb; k++) {
        const size_t source = (size_t)(k0 + k) * ldb + n0;
        if (columns == PANEL) {
% for v in range(PANEL // 8):
            vstore8(right_8(right, source + ${8 * v}), ${v}, panel + PANEL * k);
% endfor
        } else {
            for (uint j = 0; j < PANEL; j++) panel[PANEL * k + j] = j < columns ? right_1(right, source + j) : 0.0f;
        }
    }
% elif RIGHT in ("counter", "cached"):
    // Row k of the state gives the panel's row k; ldb is the length of a state row in weights.
    const uint n = ldb;
    for (uint k = 0; k < kb; k++) {
        const __global ${RIGHT_STORED} *row = right + (size_t)(k0 + k) * (${ROW});
        const float s = scale[k0 + k];
        if (columns == PANEL) {
% for v in range(PANEL // 8):
            {
                const uint j = n0 + ${8 * v};
% if CACHED:
                vstore8(s * cached_8(row, j), ${v}, panel + PANEL * k);
% else:
                const uint8 codes = ${"cc_load_8(row + j / 4 * 3)" if PACKED else "convert_uint8(vload8(0, row + j))"};
                vstore8(s * code_ternary_8(${centred("codes", 8)}), ${v}, panel + PANEL * k);
% endif
            }
% endfor
        } else {
            for (uint j = 0; j < PANEL; j++) {
                float w = 0.0f;
                if (j < columns) {
% if CACHED:
                    w = s * cached_1(row, n0 + j);
% else:
                    const uint code = ${"cc_unpack_1(row, n0 + j)" if PACKED else "row[n0 + j]"};
                    w = s * code_ternary_1(${centred("code", "")});
% endif
                }
                panel[PANEL * k + j] = w;
            }
        }
    }
% else:
    // Row j of b, or of the state, gives the panel's column j. (A state's row scale is applied to the finished sums.)
    uint j = 0;
    for (; j + 8 <= columns; j += 8) {
% for e in range(8):
        ${row_of("n0 + j + " + str(e), e)}
% endfor
        uint k = 0;
        for (; k + 8 <= kb; k += 8) {
% for e in range(8):
            const float8 a${e} = ${eight_of(e)};
% endfor
            ${transpose_8("float8", lambda e, row: f"vstore8({row}, 0, panel + PANEL * (k + {e}) + j)")}
        }
        for (; k < kb; k++) {
% for e in range(8):
            panel[PANEL * k + j + ${e}] = ${one_of(e)};
% endfor
        }
    }
    for (; j < columns; j++) {
        ${row_of("n0 + j", 0)}
        for (uint k = 0; k < kb; k++) panel[PANEL * k + j] = ${one_of(0)};
    }
    for (; j < PANEL; j++) {
        for (uint k = 0; k < kb; k++) panel[PANEL * k + j] = 0.0f;
    }
% endif
}

% endif
% if not LEFT:
// A work-item makes TILE_K rows of one panel.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_panels(const __global ${stored(RIGHT_TYPE)} *right, __global float *panels, ${"const __global long *gate, " if GATE else ""}const ulong right0,
                 const ulong right_z, const uint N, const uint K, const uint ldb) {
    const uint n = get_global_id(0) * PANEL;
    const uint k = get_global_id(1) * ${TILE_K};
    const size_t panel = get_global_id(2) * get_global_size(0) + get_global_id(0);
    fill_panel(panels + (panel * K + k) * PANEL, right + right0 + get_global_id(2) * right_z, ldb, n, min(N - n, (uint)PANEL), k,
               ${"gate[2] == 0 ? 0 : " if GATE else ""}min(K - k, ${TILE_K}u));
}
% else:
% if not TILED:
// Rows m0 .. m0 + rows as tiles of ${"[TILE_M][TILE_K]" if LEFT == "rows" else "[TILE_K][TILE_M]"}. Rows beyond the end repeat the last one; their sums are not stored.
inline void fill_tiles(${TILE_SPACE} float *tiles, const __global ${stored(LEFT_TYPE)} *a, const uint lda, const uint m0, const uint rows,
                       const uint M, const uint k0, const uint kb) {
% if LEFT == "rows":
    ${TILE_SPACE} float *tile = tiles;
    for (uint m = 0; m < rows; m += ${TILE_M}, tile += TILE_A) {
        for (uint i = 0; i < ${TILE_M}; i++) {
            const size_t source = (size_t)(m0 + min(m + i, rows - 1)) * lda + k0;
            ${TILE_SPACE} float *target = tile + ${TILE_K} * i;
            uint k = 0;
            for (; k + 8 <= kb; k += 8) vstore8(left_8(a, source + k), 0, target + k);
            for (; k < kb; k++) target[k] = left_1(a, source + k);
        }
    }
% else:
    for (uint k = 0; k < kb; k++) {
        const size_t source = (size_t)(k0 + k) * lda + m0;
        ${TILE_SPACE} float *target = tiles + ${TILE_M} * k;
        for (uint m = 0; m < rows; m += ${TILE_M}, target += TILE_A) {
            if (m0 + m + ${4 * CHUNKS} <= M) {
% for chunk in range(CHUNKS):
                vstore4(left_4(a, source + m + ${4 * chunk}), ${chunk}, target);
% endfor
            } else {
                for (uint i = 0; i < ${TILE_M}; i++) target[i] = left_1(a, source + min(m + i, rows - 1));
            }
        }
    }
% endif
}

% endif
% if not RIGHT:
// A work-item makes TILE_ROWS by TILE_K elements of tiles.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_tiles(const __global ${stored(LEFT_TYPE)} *left, __global float *tiles, ${"const __global long *gate, " if GATE else ""}const ulong left0,
                const ulong left_z, const uint M, const uint K, const uint lda) {
    const uint m = get_global_id(0) * ${TILE_ROWS};
    const uint k = get_global_id(1) * ${TILE_K};
    const size_t block = (get_global_id(2) * get_global_size(0) + get_global_id(0)) * get_global_size(1) + get_global_id(1);
    fill_tiles(tiles + block * ${BLOCK_A}, left + left0 + get_global_id(2) * left_z, lda, m, min(M - m, ${TILE_ROWS}u), M, k,
               ${"gate[2] == 0 ? 0 : " if GATE else ""}min(K - k, ${TILE_K}u));
}
% else:
// ${SUM_COLUMNS} apart, the rows of tile @ panel; added to what is there unless `first`.
inline void multiply_tile(__local float *sums, const ${TILE_SPACE} float *tile, const __local float *panel, const uint kb, const bool first) {
% for i in range(TILE_M):
% for v in range(VECTORS):
    ${V} sum${i}_${v} = (${V})(0.0f);
% endfor
% endfor
    for (uint k = 0; k < kb; k++) {
% for v in range(VECTORS):
        const ${V} b${v} = *(const __local ${V} *)(panel + PANEL * k + ${WIDTH * v});
% endfor
% for i in range(TILE_M):
        const ${V} left${i} = (${V})(tile[${f"k + {TILE_K * i}" if LEFT == "rows" else f"{TILE_M} * k + {i}"}]);
% for v in range(VECTORS):
        sum${i}_${v} += left${i} * b${v};
% endfor
% endfor
    }
    if (!first) {
% for i in range(TILE_M):
% for v in range(VECTORS):
        sum${i}_${v} += *(const __local ${V} *)(sums + ${SUM_COLUMNS * i + WIDTH * v});
% endfor
% endfor
    }
% for i in range(TILE_M):
% for v in range(VECTORS):
    *(__local ${V} *)(sums + ${SUM_COLUMNS * i + WIDTH * v}) = sum${i}_${v};
% endfor
% endfor
}

<%
FETCHED = DENSE and LEFT_TYPE == RIGHT_TYPE == "float32"
%>
% if FETCHED:
// Asks for part `turn` of `turns` of a block of `runs` runs of `length` elements, `lead` apart: what the next block of K copies
// comes nearer while this one multiplies.
inline void fetch(const __global float *p, const uint lead, const uint runs, const uint length, const uint turn, const uint turns) {
    const uint last = (turn + 1) * runs / turns;
    for (uint run = turn * runs / turns; run < last; run++) prefetch(p + (size_t)run * lead, (size_t)length);
}

% endif
% if not DENSE:
// A row of sums onto the row of `out`, which holds nothing yet when `first`; scaled by column when that is due, at the `last`.
inline void add_sums(__global float *target, const __local float *sums, const __global float *scale, const uint columns,
                     const bool first, const bool last) {
    uint j = 0;
    for (; j + 8 <= columns; j += 8) {
        float8 sum = vload8(0, sums + j);
        if (!first) sum += vload8(0, target + j);
% if BY_COLUMN:
        if (last) sum *= vload8(0, scale + j);
% endif
        vstore8(sum, 0, target + j);
    }
    for (; j < columns; j++) {
        const float sum = first ? sums[j] : sums[j] + target[j];
        target[j] = ${"last ? sum * scale[j] : sum" if BY_COLUMN else "sum"};
    }
}

% endif
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void matmul(${parameters()}) {
    __local float panels[${TILE_K * TILE_N}] __attribute__((aligned(64)));
% if not TILED:
    __local float tiles[${BLOCK_A}] __attribute__((aligned(64)));
% endif
    __local float sums[${SUM_ROWS * SUM_COLUMNS}] __attribute__((aligned(64)));
${begin()}    const uint n0 = get_global_id(0) * n_per;
    const uint n1 = min(n0 + n_per, N);
    const uint m0 = get_global_id(1) * m_per;
    const uint m1 = min(m0 + m_per, M);
    for (uint k0 = k_first; k0 < k_last || k0 == k_first; k0 += ${TILE_K}) {
        const uint kb = min(k_last - k0, ${TILE_K}u);
% if FETCHED:
        const uint next = min(k_last - k0 - kb, ${TILE_K}u);
% endif
        for (uint n = n0; n < n1; n += PANEL) {
            fill_panel(panels + ${TILE_K} * (n - n0), right, ${"" if DENSE else "scale, "}ldb, n, min(n1 - n, (uint)PANEL), k0, kb);
        }
        for (uint block = m0; block < m1; block += ${TILE_ROWS}) {
            const uint rows = min(m1 - block, ${TILE_ROWS}u);
% if TILED:
            const __global float *tiles = left + ((size_t)(block / ${TILE_ROWS}) * lda + k0 / ${TILE_K}) * ${BLOCK_A};
% else:
            fill_tiles(tiles, left, lda, block, rows, M, k0, kb);
% endif
            for (uint m = 0; m < rows; m += ${TILE_M}) {
                const ${TILE_SPACE} float *tile = tiles + m / ${TILE_M} * TILE_A;
% if FETCHED:
                if (next > 0) {
                    const uint turn = (block - m0 + m) / ${TILE_M};
                    const uint turns = (m1 - m0 + ${TILE_M - 1}) / ${TILE_M};
                    const uint k1 = k0 + ${TILE_K};
% if TILED:
                    fetch(left + ((size_t)(m0 / ${TILE_ROWS}) * lda + k1 / ${TILE_K}) * ${BLOCK_A}, lda * ${BLOCK_A}, (m1 - m0 + ${TILE_ROWS - 1}) / ${TILE_ROWS}, ${BLOCK_A}, turn, turns);
% elif LEFT == "rows":
                    fetch(left + (size_t)m0 * lda + k1, lda, m1 - m0, next, turn, turns);
% else:
                    fetch(left + (size_t)k1 * lda + m0, lda, next, m1 - m0, turn, turns);
% endif
% if RIGHT == "panels":
                    fetch(right + ((size_t)(n0 / PANEL) * ldb + k1) * PANEL, ldb * PANEL, (n1 - n0 + PANEL - 1) / PANEL, next * PANEL, turn, turns);
% elif RIGHT == "dense_t":
                    fetch(right + (size_t)n0 * ldb + k1, ldb, n1 - n0, next, turn, turns);
% else:
                    fetch(right + (size_t)k1 * ldb + n0, ldb, next, n1 - n0, turn, turns);
% endif
                }
% endif
                for (uint n = n0; n < n1; n += PANEL) {
% if DENSE:
                    multiply_tile(sums + (block - m0 + m) * ${TILE_N} + n - n0, tile, panels + ${TILE_K} * (n - n0), kb, k0 == k_first);
% else:
                    multiply_tile(sums, tile, panels + ${TILE_K} * (n - n0), kb, true);
                    const uint columns = min(n1 - n, (uint)PANEL);
                    for (uint i = 0; i < min(rows - m, ${TILE_M}u); i++) {
                        add_sums(out + (size_t)(block + m + i) * N + n, sums + PANEL * i, scale + n, columns, k0 == k_first,
                                 k0 + kb >= k_last);
                    }
% endif
                }
            }
        }
    }
% if DENSE:
    for (uint m = m0; m < m1; m++) {
        const __local float *row = sums + (m - m0) * ${TILE_N};
        const size_t target = (size_t)m * N;
        uint n = n0;
% if EPILOGUE:
        const size_t added = (size_t)m * add_m;
        for (; n + 8 <= n1 && add_n == 1; n += 8) {
            float8 sum = alpha * vload8(0, row + n - n0);
            if (beta != 0.0f) sum += beta * add_8(add, added + n);
            out_store_8(sum, out, target + n);
        }
% else:
        for (; n + 8 <= n1; n += 8) out_store_8(vload8(0, row + n - n0), out, target + n);
% endif
        for (; n < n1; n++) {
            float sum = row[n - n0];
% if EPILOGUE:
            sum *= alpha;
            if (beta != 0.0f) sum += beta * add_1(add, added + (size_t)n * add_n);
% endif
            out_store_1(sum, out, target + n);
        }
    }
% endif
}
% endif
% endif
