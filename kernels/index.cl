// Elements moved by index: rows selected, gathered, put and summed; the stable order of indices; positions of a mask.
//
// Tensors are contiguous and seen as [outer, size, inner] around the indexed dimension; x0, out0 ... are first elements.
// Indices are checked on the device: one outside 0..size-1 is reported in `faults` and counts as 0, so that nothing outside
// a buffer is touched. faults int64 [3]: kind (0 while nothing happened), the value, the size it broke.
// One template, two shapes: GPU = 1 gives a work-item an element; GPU = 0 a work-item a block of rows.
//
// Launched by memtrain_cl/launchers/index.py, index_plan.py and index_mask.py.
// Constants: PART (move, sum, walk, plan, radix, mask, search: the kernels that are built), GPU, INDEX (int64 or int32), UNIT
// (bytes moved at once by move), T (element type of what is computed), REDUCE (of walk: copy, add, multiply, amax, amin),
// WG_SIZE (items of a group in plan, radix and mask, a power of two), PER (elements an item counts in a chunk of mask).
#pragma OPENCL FP_CONTRACT OFF

#include "_types.cl"
#include "_faults.cl"

<%
UNITS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong", 16: "uint4"}
%>
// Where an index points: itself, or counted from the end where `wrap` allows that.
inline long checked(long index, const ulong size, const int wrap, volatile __global long *faults) {
    const long place = index + (wrap && index < 0 ? (long)size : 0);
    if (place >= 0 && (ulong)place < size) return place;
    report(faults, ${FAULT_INDEX}, index, (long)size);
    return 0;
}

// Rows and columns of a launch. `row` is evaluated once a row r, the body once an element (r, c).
// GPU: a group owns a tile of 2^a columns; b tiles lie side by side. CPU: an item owns a rows of b columns.
<%def name="each(row)">
% if GPU:
    const uint lid = get_local_id(0);
    const uint group = get_group_id(0);
    const uint band = group / b;
    const uint c = ((group - band * b) << a) + (lid & ((1u << a) - 1));
    const uint r = band * (uint)(get_local_size(0) >> a) + (lid >> a);
    if (r < rows && c < columns) {
        ${row}
        ${caller.body()}
    }
% else:
    const uint first_row = get_global_id(0) * a;
    const uint first_column = get_global_id(1) * b;
    const uint end_row = min(rows - first_row, a) + first_row;
    const uint end_column = min(columns - first_column, b) + first_column;
    for (uint r = first_row; r < end_row; r++) {
        ${row}
        for (uint c = first_column; c < end_column; c++) {
            ${caller.body()}
        }
    }
% endif
</%def>

% if PART in ("plan", "radix"):
#include "_index_key.cl"
% endif
% if PART in ("radix", "mask"):
#include "_scan_counts.cl"
% endif
% if PART == "move":
#include "_index_move.cl"
% elif PART == "sum":
#include "_index_sum.cl"
% elif PART == "walk":
#include "_index_walk.cl"
% elif PART == "plan":
#include "_index_plan.cl"
% elif PART == "radix":
#include "_index_radix.cl"
% elif PART == "mask":
#include "_index_mask.cl"
% elif PART == "search":
#include "_index_search.cl"
% endif
