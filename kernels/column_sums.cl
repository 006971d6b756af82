// Sums over the rows of a float32 matrix, each column in one order: the second stage of the norms' gradients of weight
// and bias.
//
//   first [n] and second [n] = the first n and the next of `columns` sums over parts [count, width], `columns` <= 2n
//
// GPU: a work-group of 16 x 16 takes 16 columns; item y of a column adds rows y, y + 16, ..., then the sixteen are
// added. CPU: a work-item takes eight columns. Launched by memtrain_cl/launchers/norm.py. Constants: GPU or not, TARGET
// (elements of the sums), and those of _rows.cl.
<%
TYPES = ("float32",)
%>
#include "_types.cl"
#include "_rows.cl"

inline void put(__global ${stored(TARGET)} *first, __global ${stored(TARGET)} *second, size_t column, uint n,
                float sum) {
    if (column < n) {
        ${store(TARGET, "first", "column", "sum")};
    } else {
        ${store(TARGET, "second", "column - n", "sum")};
    }
}

__kernel __attribute__((reqd_work_group_size(${"16, 16" if GPU else "1, 1"}, 1)))
void column_sums(const __global float *parts, const ulong parts0, __global ${stored(TARGET)} *first, const ulong first0,
                 __global ${stored(TARGET)} *second, const ulong second0, const uint n, const ulong width,
                 const ulong columns, const uint count) {
% if GPU:
    __local float scratch[256];
    const size_t column = get_global_id(0);
    const uint x = get_local_id(0);
    const uint y = get_local_id(1);
    float sum = 0.0f;
    if (column < columns) {
        for (uint row = y; row < count; row += 16) sum += parts[parts0 + row * width + column];
    }
    scratch[16 * y + x] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (y == 0 && column < columns) {
        for (uint i = 1; i < 16; i++) sum += scratch[16 * i + x];
        put(first + first0, second + second0, column, n, sum);
    }
% else:
    const size_t column = get_global_id(0) * 8;
    const uint left = (uint)min((ulong)(columns - column), (ulong)8);
    vec sums = (vec)(0.0f);
    for (uint row = 0; row < count; row++) sums += load_left_float32(parts + parts0 + row * width + column, left, 0.0f);
    float own[8];
    vstore8(sums, 0, own);
    for (uint i = 0; i < left; i++) put(first + first0, second + second0, column + i, n, own[i]);
% endif
}
