// What kernels for NVIDIA's tensor cores share: a work-group of WARPS_M x WARPS_N warps computes a block of 64*WARPS_M x 64*WARPS_N, and
// cp.async brings tiles of DEPTH elements of rows of both operands to local memory, of which STAGES wait there.
//
// Of the operands "a" and "b" the includer says: SOURCE, a pointer to the first element; LEAD, elements from a row to the next; BYTES of an
// element; and FIRST and LAST, the part of K. DEEP: an operand lies with K along its columns. A tile of it is panels [K][64] then, of 64
// of the block's rows or columns each, and of the others it is one panel [rows][K].
//
// A row of a panel is eight chunks of sixteen bytes. What reads the same chunk of eight rows at once would meet in one bank of local
// memory: so the chunks of a row are exchanged by an exclusive or with the row's number, and the eight lie in eight banks. Rows begin on
// sixteen bytes in global memory, too. The array in local memory is of uint4, since what reads and writes it wants them aligned.
<%
ITEMS = 32 * WARPS_M * WARPS_N
LENGTH = {"a": 64 * WARPS_M, "b": 64 * WARPS_N}
ORIGIN, SIZE = {"a": "m0", "b": "n0"}, {"a": "M", "b": "N"}
# Bytes of a row of a panel, and of a panel of a deep operand.
ROW = 128
PANEL = DEPTH * ROW
# Chunks of a row of a tile, and rows that all items together fill at once, eight or a multiple of it.
CHUNKS = {name: (LENGTH[name] if DEEP[name] else DEPTH) * BYTES // 16 for name in "ab"}
STEP = {name: ITEMS // CHUNKS[name] for name in "ab"}
COUNT = {name: (DEPTH if DEEP[name] else LENGTH[name]) // STEP[name] for name in "ab"}
# Where a tile begins in its stage, and the bytes of a stage.
BEGIN = {"a": 0, "b": LENGTH["a"] * DEPTH * BYTES}
STAGE = (LENGTH["a"] + LENGTH["b"]) * DEPTH * BYTES
# Elements of a chunk; what inline assembly calls registers of the sums' type.
PER = 16 // BYTES
REGISTER = {"int": "r", "float": "f"}
# The chunks that an item copies of a stage, by operand.
COPIES = [(name, i) for name in "ab" for i in range(COUNT[name])]
assert DEPTH * BYTES == ROW and all(step % 8 == 0 for step in STEP.values())
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
    const uint blocks_m = (M + ${LENGTH["a"] - 1}) / ${LENGTH["a"]};
    const uint blocks_n = (N + ${LENGTH["b"] - 1}) / ${LENGTH["b"]};
    const uint band = get_group_id(0) / (${BAND} * blocks_n);
    const uint high = min(blocks_m - band * ${BAND}, ${BAND}u);
    const uint within = get_group_id(0) - band * ${BAND} * blocks_n;
    const uint m0 = (band * ${BAND} + within % high) * ${LENGTH["a"]};
    const uint n0 = within / high * ${LENGTH["b"]};

    const uint tiles_at = (uint)(size_t)tiles;
    int next_k = ${FIRST};
    const uint turns = (${LAST} - ${FIRST} + ${DEPTH - 1}) / ${DEPTH};
% for name in "ab":
    // What an item copies of a stage: a chunk of every ${STEP[name]}th row of the tile.
    const uint row_${name} = item / ${CHUNKS[name]};
    const uint chunk_${name} = item % ${CHUNKS[name]};
    const uint place_${name} = tiles_at + ${BEGIN[name]} + chunk_${name} / 8 * ${PANEL} + row_${name} * ${ROW}
        + 16 * ((chunk_${name} ^ row_${name}) & 7);
    const size_t step_${name} = (size_t)${LEAD[name]} * ${STEP[name] * BYTES};
% if DEEP[name]:
    const __global char *from_${name} = (const __global char *)(${SOURCE[name]})
        + ((size_t)(${FIRST} + row_${name}) * ${LEAD[name]} + ${ORIGIN[name]} + ${PER} * chunk_${name}) * ${BYTES};
    const uint bytes_${name} = (uint)clamp(((int)${SIZE[name]} - (int)(${ORIGIN[name]} + ${PER} * chunk_${name})) * ${BYTES}, 0, 16);
% else:
    const __global char *from_${name} = (const __global char *)(${SOURCE[name]})
        + ((size_t)(${ORIGIN[name]} + row_${name}) * ${LEAD[name]} + ${FIRST} + ${PER} * chunk_${name}) * ${BYTES};
    // A bit a row that there is.
    uint there_${name} = 0;
    for (uint i = 0; i < ${COUNT[name]}; i++) there_${name} |= (uint)(${ORIGIN[name]} + row_${name} + i * ${STEP[name]} < ${SIZE[name]}) << i;
% endif
% endfor
</%def>
<%doc>The bytes that are left of an item's chunks of the next stage, and where that begins: stage `turn`.</%doc>
<%def name="begin_copies(turn)">
        const uint slot = (${turn}) % ${STAGES} * ${STAGE};
% for name in "ab":
% if not DEEP[name]:
        const uint bytes_${name} = (uint)clamp(((int)${LAST} - next_k - (int)(${PER} * chunk_${name})) * ${BYTES}, 0, 16);
% endif
% endfor
</%def>
<%def name="copy(copies)">
% for name, i in copies:
<% there = f"next_k + (int)(row_{name} + {i * STEP[name]}) < (int){LAST}" if DEEP[name] else f"there_{name} & {1 << i}" %>\
        // Nothing is read of a chunk of no bytes, and zeros are written.
        copy_chunk(slot + place_${name} + ${i * STEP[name] * ROW}, from_${name}${f" + {i} * step_{name}" if i else ""}, ${there} ? bytes_${name} : 0);
% endfor
</%def>
<%def name="end_copies()">
        asm volatile("cp.async.commit_group;" ::: "memory");
        next_k += ${DEPTH};
% for name in "ab":
        from_${name} += ${f"(size_t){LEAD[name]} * {DEPTH * BYTES}" if DEEP[name] else DEPTH * BYTES};
% endfor
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
