<%doc>
A tensor in chunks of CHUNK elements, and its sums, for kernels/automagic.cl. Expects what that sets, _rows.cl, _reduce.cl, _quantize.cl, _moments.cl.

A run is 16 consecutive elements. GPU: a work-group of SIDE items takes one chunk, an item every SIDE-th run of it, in registers. CPU: an item
takes a chunk in blocks of 256 elements, in local memory. `own` are the run's 16 numbers there, VECS vectors of them.

values_of_rows(per_row, row, column, columns, rows)    what per_row has for WIDTH elements from `column` of `row` on, which may reach into later rows
sum_of_floats(parts, chunks, lanes, lid)    the sum over the chunks' sums, in every item, and sum_of_float2s; `lanes`: 1024 of them in local memory
quarter_run(...)                            the vectors of a run, halved to four numbers
halve_chunk(lanes, ...)                     the sum over a chunk's LANE_COUNT lanes, of local memory; GPU: of each item's own four
each_chunk()                                a loop (def with a body), within which are: chunk, begin (its first element), count (its elements), row0 and
                                            column0 (where it begins)
each_run()                                  a loop within it, with the bodies taken(), which reads what else the run takes, elements(), which turns
                                            `own` from what is held into roots, and (ROWS) rotated(), in which they are rotated, with next_row()
                                            before it where a run is in another row than the one before, `down` below row0; the first three are told
                                            whether their runs are `whole`; within are: j (the run's place in the chunk), at (its flat index), left
                                            (elements)
</%doc>
<%
VECS = 16 // WIDTH
# Whether the codes of a whole run are one vector of words.
WORDS = PTX and ALIGNED and ROWS and ROT >= 16
%>
% if ROWS:
inline vec values_of_rows(const __global float *per_row, ulong row, uint column, uint columns, ulong rows) {
    const uint down = column / columns;
    row += down;
    column -= down * columns;
    if (columns - column >= ${WIDTH}) return (vec)(per_row[row]);
    float own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) {
        own[i] = per_row[min(row, rows - 1)];
        if (++column == columns) {
            column = 0;
            row++;
        }
    }
    return vload${WIDTH}(0, own);
}

% endif
% for T in ("float", "float2"):
inline ${T} sum_of_${T}s(const __global ${T} *parts, ulong chunks, __local ${T} *lanes, uint lid) {
    uint width = 1;
    while (width < chunks && width < 1024) width *= 2;
    for (uint lane = lid; lane < width; lane += ${ITEMS}) {
        ${T} sum = (${T})(0.0f);
        for (ulong c = lane; c < chunks; c += 1024) sum += parts[c];
        lanes[lane] = sum;
    }
% if GPU:
    barrier(CLK_LOCAL_MEM_FENCE);
% endif
    for (width /= 2; width; width /= 2) {
        for (uint lane = lid; lane < width; lane += ${ITEMS}) lanes[lane] += lanes[lane + width];
% if GPU:
        barrier(CLK_LOCAL_MEM_FENCE);
% endif
    }
    return lanes[0];
}

% endfor
#define LANE_COUNT ${4 * SIDE}

% if GPU:
inline float4 quarter_run(vec a, vec b, vec c, vec d) { return (a + c) + (b + d); }

inline float halve_chunk(__local float4 *lanes, float4 own, uint lid) {
    lanes[lid] = own;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint width = ${SIDE // 2}; width; width /= 2) {
        if (lid < width) lanes[lid] += lanes[lid + width];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    const float sum = halve_4(lanes[0]);
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}
% else:
inline float4 quarter_run(vec a, vec b) {
    const vec both = a + b;
    return both.lo + both.hi;
}

// Adds a run's four numbers to its lanes.
inline void add_run(__local float *lanes, uint j, float4 quarter) {
    lanes += j / 4 % LANE_COUNT;
    vstore4(vload4(0, lanes) + quarter, 0, lanes);
}

inline float halve_chunk(__local float *lanes) {
    for (uint width = ${2 * SIDE}; width > 8; width /= 2) {
        for (uint j = 0; j < width; j += 8) vstore8(vload8(0, lanes + j) + vload8(0, lanes + j + width), 0, lanes + j);
    }
    return halve_8(vload8(0, lanes) + vload8(0, lanes + 8));
}
% endif

<%def name="each_chunk()">
% if GPU:
    {
        const ulong chunk = get_group_id(0);
% else:
    const ulong first_chunk = get_global_id(0) * (ulong)per;
    const ulong last_chunk = min(first_chunk + per, chunks);
    for (ulong chunk = first_chunk; chunk < last_chunk; chunk++) {
% endif
        const ulong begin = chunk * ${CHUNK};
        const uint count = (uint)min(n - begin, (ulong)${CHUNK});
% if ROWS:
        const ulong row0 = begin / columns;
        const uint column0 = (uint)(begin - row0 * columns);
        // The rows, below row0, whose scale and whose largest number are at hand.
        uint scale_row = 0, own_row = 0;
        float row_scale = held_scale[row0];
% if not GPU:
        // Where in the chunk they end.
        uint scale_end = columns - column0, own_end = scale_end;
% endif
% endif
        ${caller.body()}
    }
</%def>
<%def name="held_number(q)">
% if ROWS:
            take_codes(held, at + ${WIDTH * q}, left - ${WIDTH * q}) * ${"row_scale" if ROT >= 16 else f"values_of_rows(held_scale, row0, column0 + j + {WIDTH * q}, columns, rows)"}
% else:
            load_left_float32(held + at + ${WIDTH * q}, left - ${WIDTH * q}, 0.0f)
% endif
</%def>
<%def name="row_down(row, end)">
% if GPU:
                const uint down = column0 + j < columns ? 0 : (column0 + j) / columns;
% else:
                uint down = ${row};
                if (j >= ${end}) {
                    down++;
                    ${end} += columns;
                }
% endif
</%def>
<%def name="row_known()">
% if ROT >= 16:
                ${row_down('scale_row', 'scale_end')}
                if (down != scale_row) {
                    row_scale = held_scale[row0 + down];
                    scale_row = down;
                }
% endif
</%def>
<%def name="each_run()">
<% whole = 0 %>
% if GPU:
% for whole in (1, 0) if ALIGNED else (0,):
        // Of whole chunks without conditions, so that all of a run is asked for before any of it is awaited.
        ${("if (count == %d) " % CHUNK if whole else "else ") if ALIGNED else ""}for (uint round = 0; round < count; round += ${16 * SIDE}) {
            const uint j = round + 16 * lid;
            const ulong at = begin + j;
            const uint left = ${"16" if whole else "j < count ? min(count - j, 16u) : 0"};
            float own[16];
% if not whole:
            #pragma unroll
            for (uint k = 0; k < 16; k++) own[k] = 0.0f;
% endif
            ${caller.taken(whole)}
% if WORDS and whole:
            const uint4 words = *(const __global uint4 *)(held + at);
            ${row_known()}
% for q in range(4):
            vstore4(quick_bytes(words.s${q} ^ 0x80808080u) * row_scale, ${q}, own);
% endfor
% else:
            if (left) {
                ${row_known()}
% for q in range(VECS):
                if (left > ${WIDTH * q}) vstore${WIDTH}(${held_number(q)}, 0, own + ${WIDTH * q});
% endfor
            }
% endif
% if ROWS:
            rotate_runs(own, exchanged, lid);
% endif
            ${caller.elements(whole)}
% if ROWS:
            ${"whole_rotation" if ROT == 256 and NAME == "automagic_measure" else "rotate_runs"}(own, exchanged, lid);
            if (left) {
% if ROT >= 16:
                ${row_down('own_row', 'own_end')}
                if (down != own_row) {
                    ${caller.next_row()}
                    own_row = down;
                }
% endif
                ${caller.rotated(whole)}
            }
% endif
        }
% endfor
% else:
        for (uint base = 0; base < count; base += 256) {
            const uint size = min(count - base, 256u);
            for (uint i = 0; i < size; i += 16) {
                const uint j = base + i;
                const ulong at = begin + j;
                const uint left = size - i;
                ${row_known()}
% for q in range(VECS):
                vstore8(left > ${WIDTH * q} ? ${held_number(q)} : (vec)(0.0f), 0, block + i + ${WIDTH * q});
% endfor
            }
% if ROWS:
            rotate_block(block, size);
% endif
            for (uint i = 0; i < size; i += 16) {
                const uint j = base + i;
                const ulong at = begin + j;
                const uint left = size - i;
                __local float *own = block + i;
                ${caller.taken(whole)}
                ${caller.elements(whole)}
            }
% if ROWS:
            rotate_block(block, size);
            for (uint i = 0; i < size; i += 16) {
                const uint j = base + i;
                const ulong at = begin + j;
                const uint left = size - i;
                __local float *own = block + i;
% if ROT >= 16:
                ${row_down('own_row', 'own_end')}
                if (down != own_row) {
                    ${caller.next_row()}
                    own_row = down;
                }
% endif
                ${caller.rotated(whole)}
            }
% endif
        }
% endif
</%def>
