// Tensor cores of compute capability 9.0, by NVIDIA's inline PTX: four warps compute 64 x 256 of a block of 128 x 256 (_core_copies.cl, DEPTH
// 128) by m64n256k32, which reads both operands from local memory, on its own while the warps go on. The instructions are for the target
// sm_90a, which OpenCL's compiler does not name: they are comments to it, which memtrain_cl/program.py makes instructions in its PTX.
//
// A stage's products may still run when the next one's begin, so copies go to a stage that was left two turns ago. What cp.async wrote is
// seen by the products after a fence of each item that wrote. Of the sums a lane holds rows lane/4 and lane/4 + 8 of its warp's 16, and
// columns 2*(lane%4) and the next of every 8.
<%
assert (WARPS_M, WARPS_N, DEPTH) == (2, 4, 128)
SUMS = [f"s{i}" for i in range(128)]
LIST = ", ".join(f"%{i}" for i in range(128))
%>
<%def name="hopper(text, operands)">
        asm volatile("//@ ${text}" ${operands} : "memory");
</%def>
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void matmul_int8(${parameters()}, const uint pairs) {
    // Eight rows of 128 bytes, exchanged, are what the descriptors below call a swizzle of 128 bytes; they begin on its size.
    __local uint4 tiles[${STAGES * STAGE // 16}] __attribute__((aligned(1024)));
    if (gated && gate[2] == 0) return;
${begin_block()}
    // Of an operand in local memory: its address / 16, 1024 / 16 between groups of eight rows, and the swizzle.
    const ulong kind = (ulong)1 << 62 | (ulong)64 << 32 | (ulong)1 << 16;
    const uint team = warp / 4;
    const int going = 1;
% for i in range(0, 128, 8):
    int ${", ".join(f"{name} = 0" for name in SUMS[i:i + 8])};
% endfor
${copy_stages(STAGES - 2)}
    for (uint turn = 0; turn < turns; turn++) {
        asm volatile("cp.async.wait_group ${STAGES - 3};" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint stage = tiles_at + turn % ${STAGES} * ${STAGE};
        const ulong of_a = kind | (ulong)((stage + team * ${64 * DEPTH}) >> 4);
        const ulong of_b = kind | (ulong)((stage + ${BEGIN["b"]}) >> 4);
${hopper("wgmma.fence.sync.aligned;", "::")}
% for part in range(DEPTH // 32):
        asm volatile("//@ { .reg .pred go; setp.ne.b32 go, %130, 0; wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {${LIST}}, %128, %129, go; }"
                     : ${", ".join(f'"+r"({name})' for name in SUMS)} : "l"(of_a + ${2 * part}), "l"(of_b + ${2 * part}), "r"(going) : "memory");
% endfor
${hopper("wgmma.commit_group.sync.aligned;", "::")}
        {
${begin_copies(f"turn + {STAGES - 2}")}
${copy(COPIES)}
${end_copies()}
        }
        // The products of the turn before have ended for these four warps; for the others after the next barrier.
        asm volatile("//@ wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("//@ wgmma.wait_group.sync.aligned 0;" : ${", ".join(f'"+r"({name})' for name in SUMS)} :: "memory");
${begin_results()}
% for h in range(2):
    {
        const uint m = m0 + warp * 16 + lane / 4 + ${8 * h};
        if (m < M) {
            const float own = scales ? row[row0 + m] : 1.0f;
            __global int *target = out + (size_t)m * N;
% for j in range(32):
${put_pair(f"lane % 4 * 2 + {8 * j}", f"s{4 * j + 2 * h}", f"s{4 * j + 2 * h + 1}")}
% endfor
        }
    }
% endfor
}
