// Scatter with a work-item a fibre: out[o, :, i] takes from values[o, :, i] alone, in ascending order, so nothing races.
// out [rows = outer, size, columns]; index [outer, count, columns], values of the same shape, or one element where step = 0.
<%
COMBINE = {"copy": "value", "add": "old + value", "multiply": "old * value",
           # A NaN wins, as in torch.
           "amax": "(old != old || old > value) ? old : value", "amin": "(old != old || old < value) ? old : value"}
%>
__kernel void scatter_walk(const __global ${stored(T)} *values, const ulong values0, const __global ${stored(INDEX)} *index,
                           const ulong index0, __global ${stored(T)} *out, const ulong out0, volatile __global long *faults,
                           const ulong size, const uint count, const uint step, const uint rows, const uint columns,
                           const uint a, const uint b) {
    <%self:each row="">
        for (uint k = 0; k < count; k++) {
            const ulong from = ((ulong)r * count + k) * columns + c;
            const ulong to = out0 + (r * size + checked(index[index0 + from], size, 0, faults)) * columns + c;
            const ${compute(T)} value = ${load(T, "values", "values0 + from * step")};
% if REDUCE != "copy":
            const ${compute(T)} old = ${load(T, "out", "to")};
% endif
            ${store(T, "out", "to", COMBINE[REDUCE])};
        }
    </%self:each>
}
