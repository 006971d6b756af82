// Products on tensor cores of compute capability 9.0, by NVIDIA's inline PTX: four warps compute 64 x 256 of a block of 128 x 256
// (_core_copies.cl) by m64n256 over 32 bytes of K, which reads both operands from local memory, on its own while the warps go on. The
// instructions are for the target sm_90a, which OpenCL's compiler does not name: they are comments to it, which memtrain_cl/program.py makes
// instructions in its PTX.
//
// A stage's products may still run when the next one's begin, so copies go to a stage that was left two turns ago. What cp.async wrote is
// seen by the products after a fence of each item that wrote. Of the sums a lane holds rows lane/4 and lane/4 + 8 of its warp's 16, and
// columns 2*(lane%4) and the next of every 8. The tiles begin on 1024 bytes. The includer says what it says to _core_mma.cl, and in
// MODES what comes behind the operands.
<%
assert (WARPS_M, WARPS_N) == (2, 4)
SUMS = [f"s{i}" for i in range(128)]
LIST = ", ".join(f"%{i}" for i in range(128))
RESULTS = [
    (f"m_own + {8 * h}", [(f"n_own + {8 * j}", f"s{4 * j + 2 * h}", f"s{4 * j + 2 * h + 1}") for j in range(32)]) for h in range(2)
]
%>
<%def name="hopper(text, operands)">
        asm volatile("//@ ${text}" ${operands} : "memory");
</%def>
<%doc>All products of the block: after begin_block, up to the sums.</%doc>
<%def name="products_wgmma()">
    // Of an operand in local memory: its address / 16; the bytes / 16 between panels, and between eight rows, whose chunks are exchanged as
    // the kind of 128 bytes says.
    const ulong kind = (ulong)1 << 62 | (ulong)${8 * ROW // 16} << 32;
    const uint team = warp / 4;
    const int going = 1;
% for i in range(0, 128, 8):
    ${SUM} ${", ".join(f"{name} = 0" for name in SUMS[i:i + 8])};
% endfor
${copy_stages(STAGES - 2)}
    for (uint turn = 0; turn < turns; turn++) {
        asm volatile("cp.async.wait_group ${STAGES - 3};" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint stage = tiles_at + turn % ${STAGES} * ${STAGE};
        const ulong of_a = kind | ${PANEL // 16 if DEEP["a"] else 1} << 16 | (ulong)((stage + team * ${64 * ROW}) >> 4);
        const ulong of_b = kind | ${PANEL // 16 if DEEP["b"] else 1} << 16 | (ulong)((stage + ${BEGIN["b"]}) >> 4);
${hopper("wgmma.fence.sync.aligned;", "::")}
% for part in range(4):
<% of_a, of_b = (f"of_{name} + {part * (32 // BYTES * ROW // 16 if DEEP[name] else 2)}" for name in "ab") %>\
        asm volatile("//@ { .reg .pred go; setp.ne.b32 go, %130, 0; wgmma.mma_async.sync.aligned.${INSTRUCTION["wgmma"]} {${LIST}}, %128, %129, go${MODES}; }"
                     : ${", ".join(f'"+{REGISTER[SUM]}"({name})' for name in SUMS)} : "l"(${of_a}), "l"(${of_b}), "r"(going) : "memory");
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
    asm volatile("//@ wgmma.wait_group.sync.aligned 0;" : ${", ".join(f'"+{REGISTER[SUM]}"({name})' for name in SUMS)} :: "memory");
    const uint m_own = m0 + warp * 16 + lane / 4;
    const uint n_own = lane % 4 * 2;
</%def>
