// What the kernels for NVIDIA's tensor cores share (_int8_mma.cl, _int8_wgmma.cl): a work-group of WARPS_M x WARPS_N warps computes a block
// of 64*WARPS_M x 64*WARPS_N, and cp.async brings tiles of DEPTH elements of rows of a and of b to local memory, of which STAGES wait there.
//
// A row of a tile is DEPTH / 16 chunks of sixteen bytes. What reads the same chunk of eight rows at once would meet in one bank of local
// memory: so the chunks of a row are exchanged by an exclusive or with a number of the row, and the eight lie in eight banks. Rows begin
// on sixteen bytes (lda, ldb, a0, b0). The array in local memory is of uint4, since what reads and writes it wants them aligned.
<%
ITEMS = 32 * WARPS_M * WARPS_N
ROWS_A, ROWS_B = 64 * WARPS_M, 64 * WARPS_N
CHUNKS = DEPTH // 16
# Chunks of a stage, and rows that all items together fill at once.
STAGE = (ROWS_A + ROWS_B) * CHUNKS
STEP = ITEMS // CHUNKS
# Rows whose chunks make the 128 bytes of all banks share one number.
SPREAD = max(8 // CHUNKS, 1)
# The chunks that an item copies of a stage, by operand.
COPIES = [("a", i) for i in range(ROWS_A // STEP)] + [("b", i) for i in range(ROWS_B // STEP)]
%>
inline void copy_chunk(const uint to, const __global char *from, const uint bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

<%doc>Which block of the result is a group's, and what its items copy: m0, n0, tiles_at; before the first copies.</%doc>
<%def name="begin_block()">
    const uint item = get_local_id(0);
    const uint lane = item & 31;
    const uint warp = item >> 5;
    // Bands of ${BAND} rows of blocks, column by column, so that what groups read at a time stays in the cache.
    const uint blocks_m = (M + ${ROWS_A - 1}) / ${ROWS_A};
    const uint blocks_n = (N + ${ROWS_B - 1}) / ${ROWS_B};
    const uint band = get_group_id(0) / (${BAND} * blocks_n);
    const uint high = min(blocks_m - band * ${BAND}, ${BAND}u);
    const uint within = get_group_id(0) - band * ${BAND} * blocks_n;
    const uint m0 = (band * ${BAND} + within % high) * ${ROWS_A};
    const uint n0 = within / high * ${ROWS_B};

    // What an item copies of a stage: a chunk of every ${STEP}th row of either operand; a bit a row that there is.
    const uint own_row = item / ${CHUNKS};
    const uint own_chunk = item % ${CHUNKS};
    const uint tiles_at = (uint)(size_t)tiles;
    const uint own_place = 16 * (own_row * ${CHUNKS} + (own_chunk ^ (own_row / ${SPREAD} % ${CHUNKS})));
    const __global char *from_a = a + a0 + (size_t)(m0 + own_row) * lda + 16 * own_chunk;
    const __global char *from_b = b + b0 + (size_t)(n0 + own_row) * ldb + 16 * own_chunk;
    const size_t step_a = (size_t)lda * ${STEP};
    const size_t step_b = (size_t)ldb * ${STEP};
    uint there_a = 0, there_b = 0;
    for (uint i = 0; i < ${ROWS_A // STEP}; i++) there_a |= (uint)(m0 + own_row + i * ${STEP} < M) << i;
    for (uint i = 0; i < ${ROWS_B // STEP}; i++) there_b |= (uint)(n0 + own_row + i * ${STEP} < N) << i;
    uint copied = 16 * own_chunk;
    const uint turns = (K + ${DEPTH - 1}) / ${DEPTH};
</%def>
<%doc>The bytes that are left of an item's chunks of the next stage, and where the first of them goes: to stage `turn`.</%doc>
<%def name="begin_copies(turn)">
        const int left = (int)K - (int)copied;
        const uint bytes = (uint)clamp(left, 0, 16);
        const uint slot = tiles_at + own_place + (${turn}) % ${STAGES} * ${STAGE * 16};
</%def>
<%def name="copy(copies)">
% for name, i in copies:
        // Nothing is read of a chunk of no bytes, and zeros are written.
        copy_chunk(slot + ${(ROWS_A * DEPTH if name == "b" else 0) + i * STEP * DEPTH}, from_${name}${f" + {i} * step_{name}" if i else ""},
                   there_${name} & ${1 << i} ? bytes : 0);
% endfor
</%def>
<%def name="end_copies()">
        asm volatile("cp.async.commit_group;" ::: "memory");
        copied += ${DEPTH};
        from_a += ${DEPTH};
        from_b += ${DEPTH};
</%def>
<%def name="copy_stages(count)">
% for s in range(count):
    {
${begin_copies(s)}
${copy(COPIES)}
${end_copies()}
    }
% endfor
</%def>
<%doc>After the last products: what each column's sums are multiplied by comes to local memory, as `factors`.</%doc>
<%def name="begin_results()">
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    barrier(CLK_LOCAL_MEM_FENCE);
    __local float *factors = (__local float *)tiles;
    for (uint i = item; i < ${ROWS_B}; i += ${ITEMS}) factors[i] = scales == 2 && n0 + i < N ? col[n0 + i] : 1.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
</%def>
<%doc>Two neighbouring sums of row m to their place, from column n0 + at on. `own`: the row's factor.</%doc>
<%def name="put_pair(at, x, y)">
            {
                const uint n = n0 + ${at};
                int2 sums = (int2)(${x}, ${y});
                if (scales) sums = as_int2(convert_float2(sums) * (own * *(__local float2 *)(factors + ${at})));
                if (n + 1 < N) {
                    if (pairs) *(__global int2 *)(target + n) = sums;
                    else vstore2(sums, 0, target + n);
                } else if (n < N) {
                    target[n] = sums.x;
                }
            }
</%def>
