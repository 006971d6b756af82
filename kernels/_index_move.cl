// Moves: elements pass as bits, in units of UNIT bytes. Needs: UNITS, checked, each.
<% U = UNITS[UNIT] %>
// out[o, k, :] = x[o, index[k], :]. x [outer, size, columns], out [rows = outer*count, columns].
__kernel void select_rows(const __global ${U} *x, const ulong x0, const __global ${stored(INDEX)} *index, const ulong index0,
                          __global ${U} *out, const ulong out0, volatile __global long *faults, const ulong size,
                          const uint count, const int wrap, const uint rows, const uint columns, const uint a, const uint b) {
<%
row = """const uint o = r / count;
        const long at = checked(index[index0 + (r - o * count)], size, wrap, faults);
        const __global %s *source = x + x0 + (o * size + at) * columns;
        __global %s *target = out + out0 + (ulong)r * columns;""" % (U, U)
%>
    <%self:each row="${row}">
        target[c] = source[c];
    </%self:each>
}

// out[o, index[k], :] = values[o, k, :], or values[0] everywhere where step = 0. No index may occur twice unless step = 0.
__kernel void put_rows(const __global ${U} *values, const ulong values0, const __global ${stored(INDEX)} *index,
                       const ulong index0, __global ${U} *out, const ulong out0, volatile __global long *faults,
                       const ulong size, const uint count, const int wrap, const uint step, const uint rows,
                       const uint columns, const uint a, const uint b) {
<%
row = """const uint o = r / count;
        const long at = checked(index[index0 + (r - o * count)], size, wrap, faults);
        const __global %s *source = values + values0 + (ulong)r * columns * step;
        __global %s *target = out + out0 + (o * size + at) * columns;""" % (U, U)
%>
    <%self:each row="${row}">
        target[c] = source[(ulong)c * step];
    </%self:each>
}

// out[o, keys[p], i] = values[o, order[p], i] for the last p of each run of equal keys. rows = count, columns = outer*inner.
__kernel void put_sorted(const __global ${U} *values, const ulong values0, const __global uint *keys,
                         const __global uint *order, __global ${U} *out, const ulong out0, const ulong size, const uint inner,
                         const uint rows, const uint columns, const uint a, const uint b) {
<%
row = """const uint key = keys[r];
        if (r + 1 < rows && keys[r + 1] == key) %s;
        const ulong source = values0 + (ulong)order[r] * inner;
        const ulong target = out0 + (ulong)key * inner;""" % ("return" if GPU else "continue")
%>
    <%self:each row="${row}">
        const uint o = c / inner;
        const uint i = c - o * inner;
        out[target + o * size * inner + i] = values[source + (ulong)o * rows * inner + i];
    </%self:each>
}

// out[o, k, i] = x[o, index[o, k, i], i]. x [outer, size, columns]; index, out [rows = outer*count, columns].
__kernel void gather(const __global ${U} *x, const ulong x0, const __global ${stored(INDEX)} *index, const ulong index0,
                     __global ${U} *out, const ulong out0, volatile __global long *faults, const ulong size, const uint count,
                     const uint rows, const uint columns, const uint a, const uint b) {
    <%self:each row="const uint o = r / count;">
        const ulong at = (ulong)r * columns + c;
        out[out0 + at] = x[x0 + (o * size + checked(index[index0 + at], size, 0, faults)) * columns + c];
    </%self:each>
}

// out[o, index[o, k, i], i] = values[0]. out [outer, size, columns]; index [rows = outer*count, columns].
__kernel void scatter_value(const __global ${U} *values, const ulong values0, const __global ${stored(INDEX)} *index,
                            const ulong index0, __global ${U} *out, const ulong out0, volatile __global long *faults,
                            const ulong size, const uint count, const uint rows, const uint columns, const uint a,
                            const uint b) {
    <%self:each row="const uint o = r / count;">
        const long at = checked(index[index0 + (ulong)r * columns + c], size, 0, faults);
        out[out0 + (o * size + at) * columns + c] = values[values0];
    </%self:each>
}
