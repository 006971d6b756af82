// Sums by index, in ascending order of the source and without atomics: the indices come sorted (index_plan), and the item at
// the head of a run of equal keys adds all of it.
<%
AHEAD = 16 if GPU else 1  # rows whose loads are in flight together
WIDE = 32                 # columns that a CPU's item sums at once
%>
<%def name="sum_run(width)">
                for (uint w = 0; w < ${width}; w++) sum[w] = ${load(T, "out", "target + w")};
                for (uint p = r; p < end; p++) {
                    const ulong from = values0 + (source + (ulong)order[p] * inner) * step;
                    for (uint w = 0; w < ${width}; w++) sum[w] += scale * ${load(T, "values", "from + w * step")};
                }
                for (uint w = 0; w < ${width}; w++) ${store(T, "out", "target + w", "sum[w]")};
</%def>
// out[o, keys[p], i] += scale * values[o, order[p], i], summed in ${compute(T)}; keys equal to `skipped` add nothing.
// rows = count of keys, columns = outer*inner. values [outer, rows, inner], or one element where step = 0; out [outer, size,
// inner].
__kernel void sum_sorted(const __global ${stored(T)} *values, const ulong values0, const __global uint *keys,
                         const __global uint *order, __global ${stored(T)} *out, const ulong out0, const ulong size,
                         const uint inner, const ${compute(T)} scale, const ulong skipped, const uint step, const uint rows,
                         const uint columns, const uint a, const uint b) {
% if GPU:
    <%self:each row="">
        const uint key = keys[r];
        if (key == skipped || (r > 0 && keys[r - 1] == key)) return;
        const uint o = c / inner;
        const uint i = c - o * inner;
        const ulong target = out0 + (o * size + key) * inner + i;
        const ulong source = (ulong)o * rows * inner + i;
        ${compute(T)} sum = ${load(T, "out", "target")};
        for (uint p = r; p < rows && keys[p] == key; p += ${AHEAD}) {
            ${compute(T)} part[${AHEAD}];
            #pragma unroll
            for (uint u = 0; u < ${AHEAD}; u++) {
                const uint q = min(p + u, rows - 1);
                part[u] = 0;
                const ulong from = values0 + (source + (ulong)order[q] * inner) * step;
                if (p + u < rows && keys[q] == key) part[u] = ${load(T, "values", "from")};
            }
            #pragma unroll
            for (uint u = 0; u < ${AHEAD}; u++) {
                if (p + u < rows && keys[min(p + u, rows - 1)] == key) sum += scale * part[u];
            }
        }
        ${store(T, "out", "target", "sum")};
    </%self:each>
% else:
    const uint first_row = get_global_id(0) * a;
    const uint end_row = min(rows - first_row, a) + first_row;
    const uint first_column = get_global_id(1) * b;
    const uint end_column = min(columns - first_column, b) + first_column;
    for (uint r = first_row; r < end_row; r++) {
        const uint key = keys[r];
        if (key == skipped || (r > 0 && keys[r - 1] == key)) continue;
        uint end = r + 1;
        while (end < rows && keys[end] == key) end++;
        uint c = first_column;
        while (c < end_column) {
            const uint o = c / inner;
            const uint i = c - o * inner;
            const uint width = min(min(inner - i, end_column - c), ${WIDE}u);
            const ulong target = out0 + (o * size + key) * inner + i;
            const ulong source = (ulong)o * rows * inner + i;
            ${compute(T)} sum[${WIDE}];
            // A known width lets compilers make vectors of the loops.
            if (width == ${WIDE}) {
                ${sum_run(WIDE)}
            } else {
                ${sum_run("width")}
            }
            c += width;
        }
    }
% endif
}
