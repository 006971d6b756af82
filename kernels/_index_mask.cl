// Positions of what is not zero: count_mask counts in chunks, scan_counts sums the counts up, write_positions writes.
// x [n] of type T. A work-group owns a chunk, an item of it PER consecutive elements; on a CPU a work-item owns a chunk.

// counts uint [chunks].
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void count_mask(const __global ${stored(T)} *x, const ulong x0, __global uint *counts, const ulong n, const ulong chunk) {
    __local uint count;
    const uint lid = get_local_id(0);
    if (lid == 0) count = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    const ulong begin = get_group_id(0) * chunk;
    uint own = 0;
    for (ulong i = begin + lid; i < min(n, begin + chunk); i += ${WG_SIZE}) own += ${load(T, "x", "x0 + i")} != 0;
    atomic_add(&count, own);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) counts[get_group_id(0)] = count;
}
% else:
__kernel void count_mask(const __global ${stored(T)} *x, const ulong x0, __global uint *counts, const ulong n,
                         const ulong chunk) {
    const ulong begin = get_global_id(0) * chunk;
    uint own = 0;
    for (ulong i = begin; i < min(n, begin + chunk); i++) own += ${load(T, "x", "x0 + i")} != 0;
    counts[get_global_id(0)] = own;
}
% endif

// out int64 [total]: ascending positions of the elements that are not zero.
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void write_positions(const __global ${stored(T)} *x, const ulong x0, const __global uint *counts, __global long *out,
                     const ulong n, const ulong chunk) {
    __local uint sums[${WG_SIZE}];
    const uint lid = get_local_id(0);
    const ulong begin = get_group_id(0) * chunk + lid * ${PER};
    uint own = 0;
    for (uint u = 0; u < ${PER}; u++) own += begin + u < n && ${load(T, "x", "x0 + begin + u")} != 0;
    sums[lid] = own;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint reach = 1; reach < ${WG_SIZE}; reach *= 2) {
        const uint left = lid >= reach ? sums[lid - reach] : 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        sums[lid] += left;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    uint to = counts[get_group_id(0)] + sums[lid] - own;
    for (uint u = 0; u < ${PER}; u++) {
        if (begin + u < n && ${load(T, "x", "x0 + begin + u")} != 0) out[to++] = (long)(begin + u);
    }
}
% else:
__kernel void write_positions(const __global ${stored(T)} *x, const ulong x0, const __global uint *counts, __global long *out,
                              const ulong n, const ulong chunk) {
    const ulong begin = get_global_id(0) * chunk;
    uint to = counts[get_global_id(0)];
    for (ulong i = begin; i < min(n, begin + chunk); i++) {
        if (${load(T, "x", "x0 + i")} != 0) out[to++] = (long)i;
    }
}
% endif

// out[i, axis] of int64 [n, axes]: the coordinate along one dimension of `size` elements that lie `stride` apart.
__kernel void write_coordinate(const __global long *positions, __global long *out, const ulong stride, const ulong size,
                               const uint axis, const uint axes, const uint n) {
    const uint i = get_global_id(0);
    if (i >= n) return;
    const ulong whole = (ulong)positions[i] / stride;
    out[(ulong)i * axes + axis] = (long)(whole - (whole / size) * size);
}
