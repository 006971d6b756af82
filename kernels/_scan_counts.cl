// counts[i] becomes the sum of those before it; total[0] the sum of all. One work-group, or on a CPU one work-item.
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void scan_counts(__global uint *counts, __global uint *total, const uint n) {
    __local uint sums[${WG_SIZE}];
    const uint lid = get_local_id(0);
    uint carry = 0;
    for (uint base = 0; base < n; base += ${4 * WG_SIZE}) {
        uint own[4];
        uint sum = 0;
        #pragma unroll
        for (uint u = 0; u < 4; u++) {
            const uint i = base + 4 * lid + u;
            own[u] = i < n ? counts[i] : 0;
            sum += own[u];
        }
        sums[lid] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint reach = 1; reach < ${WG_SIZE}; reach *= 2) {
            const uint left = lid >= reach ? sums[lid - reach] : 0;
            barrier(CLK_LOCAL_MEM_FENCE);
            sums[lid] += left;
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        uint before = carry + sums[lid] - sum;
        carry += sums[${WG_SIZE - 1}];
        #pragma unroll
        for (uint u = 0; u < 4; u++) {
            const uint i = base + 4 * lid + u;
            if (i < n) counts[i] = before;
            before += own[u];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lid == 0) total[0] = carry;
}
% else:
__kernel void scan_counts(__global uint *counts, __global uint *total, const uint n) {
    uint before = 0;
    for (uint i = 0; i < n; i++) {
        const uint count = counts[i];
        counts[i] = before;
        before += count;
    }
    total[0] = before;
}
% endif
