// out[r, c] = how many elements of the ascending row r of `sorted` lie before x[r, c]: those below it, or where `right` also
// those equal to it. sorted [rows, length], or [length] for every row where apart = 0; x, out [rows, columns]; a NaN comes
// last.
__kernel void search_sorted(const __global ${stored(T)} *sorted, const ulong sorted0, const __global ${stored(T)} *x,
                            const ulong x0, __global ${stored(INDEX)} *out, const ulong out0, const uint length,
                            const uint apart, const int right, const uint rows, const uint columns, const uint a,
                            const uint b) {
    <%self:each row="const ulong begin = sorted0 + (ulong)r * apart;">
        const ${compute(T)} value = ${load(T, "x", "x0 + (ulong)r * columns + c")};
        uint low = 0;
        uint high = length;
        while (low < high) {
            const uint middle = low + (high - low) / 2;
            const ${compute(T)} other = ${load(T, "sorted", "begin + middle")};
            const int before = right ? !(other > value) : !(other >= value);
            low = before ? middle + 1 : low;
            high = before ? high : middle;
        }
        out[out0 + (ulong)r * columns + c] = (${stored(INDEX)})low;
    </%self:each>
}
