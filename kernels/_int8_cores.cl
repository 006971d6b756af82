// Exact products on tensor cores, by the instruction that KIND names (_core_mma.cl, _core_wgmma.cl).
<%
BYTES, DEEP = 1, {"a": False, "b": False}
SOURCE, LEAD, FIRST, LAST = {"a": "a + a0", "b": "b + b0"}, {"a": "lda", "b": "ldb"}, "0", "K"
SUM, MODES = "int", ""
INSTRUCTION = {"mma": "m16n8k32.row.col.s32.s8.s8.s32", "wgmma": "m64n256k32.s32.s8.s8"}
%>
#include "_core_copies.cl"
% if KIND == "mma":
#include "_core_mma.cl"
% else:
#include "_core_wgmma.cl"
% endif
<%doc>Two neighbouring sums of row m to their place, from column n0 + at on. `own`: the row's factor.</%doc>
<%def name="put_pair(at, x, y)">
            {
                const uint n = n0 + ${at};
                int2 sums = (int2)(${x}, ${y});
                if (scales) sums = as_int2(convert_float2(sums) * (own * *(__local float2 *)(factors + ${at})));
                if (n + 1 < N) {
                    if (pairs) *(__global int2 *)(target + n) = sums;
                    else vstore2(sums, 0, target + n);
                } else if (n < N) {
                    target[n] = sums.x;
                }
            }
</%def>
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void matmul_int8(${parameters()}, const uint pairs) {
    __local uint4 tiles[${STAGES * STAGE // 16}] __attribute__((aligned(1024)));
    if (gated && gate[2] == 0) return;
${begin_block()}
${products_mma() if KIND == "mma" else products_wgmma()}
    // What each column's sums are multiplied by comes to local memory.
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    barrier(CLK_LOCAL_MEM_FENCE);
    __local float *factors = (__local float *)tiles;
    for (uint i = item; i < ${LENGTH["b"]}; i += ${ITEMS}) factors[i] = scales == 2 && n0 + i < N ? col[n0 + i] : 1.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
% for m, sums in RESULTS:
    {
        const uint m = ${m};
        if (m < M) {
            const float own = scales ? row[row0 + m] : 1.0f;
            __global int *target = out + (size_t)m * N;
% for at, x, y in sums:
${put_pair(at, x, y)}
% endfor
        }
    }
% endfor
}
