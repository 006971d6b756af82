// Tensor cores of compute capability 8.0 and above, by NVIDIA's inline PTX: a warp computes 64 x 64 of a block (_int8_copies.cl) as
// 4 x 8 products of m16n8k32. While a part of 32 elements of a stage is multiplied, the next one comes to registers. What a lane holds
// of a and b is what ldmatrix gives it; of the sums, rows lane/4 and lane/4 + 8, columns 2*(lane%4) and the next, of each 16 x 8 block.
<%
FOUR = range(4)
EIGHT = range(8)
# Parts of a stage, and the copies of the next one that go with each but the last.
PARTS = DEPTH // 32
SHARE = -(-len(COPIES) // (PARTS - 1))
%>
<%def name="load_four(names, address)">
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : ${", ".join(f'"=r"({name})' for name in names)} : "r"(${address}) : "memory");
</%def>
<%doc>A warp's part of both operands into one of its two sets of registers.</%doc>
<%def name="load_part(stage, part)">
<% S = part % 2 %>
        {
            const uint place_a = ${stage} + own_a + ((half_a ^ ${2 * part}) << 4);
            const uint place_b = ${stage} + own_b + ((half_b ^ ${2 * part}) << 4);
% for i in FOUR:
${load_four([f"a{S}_{i}_{e}" for e in FOUR], f"place_a + {i * 16 * DEPTH}")}
% endfor
% for j in FOUR:
${load_four([f"b{S}_{n}_{e}" for n in (2 * j, 2 * j + 1) for e in range(2)], f"place_b + {j * 16 * DEPTH}")}
% endfor
        }
</%def>
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void matmul_int8(${parameters()}, const uint pairs) {
    __local uint4 tiles[${STAGES * STAGE}];
    if (gated && gate[2] == 0) return;
${begin_block()}
    // Where a lane's rows of the warp's parts begin, and the exchanged number of its chunk in the first part.
    const uint own_a = ((warp / ${WARPS_N}) * 64 + (lane & 15)) * ${DEPTH};
    const uint own_b = ${ROWS_A * DEPTH} + ((warp % ${WARPS_N}) * 64 + (lane & 7) + ((lane >> 4) << 3)) * ${DEPTH};
    const uint turned = (lane & 7) / ${SPREAD} % ${CHUNKS};
    const uint half_a = turned ^ (lane >> 4);
    const uint half_b = turned ^ ((lane >> 3) & 1);
% for i in FOUR:
% for j in EIGHT:
    int ${", ".join(f"s{i}_{j}_{e} = 0" for e in FOUR)};
% endfor
% endfor
% for S in range(2):
    uint ${", ".join(f"a{S}_{i}_{e}" for i in FOUR for e in FOUR)};
    uint ${", ".join(f"b{S}_{j}_{e}" for j in EIGHT for e in range(2))};
% endfor
${copy_stages(STAGES - 1)}
    asm volatile("cp.async.wait_group ${STAGES - 2};" ::: "memory");
    barrier(CLK_LOCAL_MEM_FENCE);
${load_part("tiles_at", 0)}
    for (uint turn = 0; turn < turns; turn++) {
        const uint stage = tiles_at + turn % ${STAGES} * ${STAGE * 16};
        // Into the stage that everyone had left at the last barrier.
${begin_copies(f"turn + {STAGES - 1}")}
% for part in range(PARTS):
% if part + 1 < PARTS:
${load_part("stage", part + 1)}
${copy(COPIES[part * SHARE:(part + 1) * SHARE])}
% else:
${end_copies()}
        asm volatile("cp.async.wait_group ${STAGES - 2};" ::: "memory");
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint next = tiles_at + (turn + 1) % ${STAGES} * ${STAGE * 16};
${load_part("next", 0)}
% endif
% for j in EIGHT:
% for i in FOUR:
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : ${", ".join(f'"+r"(s{i}_{j}_{e})' for e in FOUR)}
            : ${", ".join(f'"r"(a{part % 2}_{i}_{e})' for e in FOUR)}, "r"(b${part % 2}_${j}_0), "r"(b${part % 2}_${j}_1));
% endfor
% endfor
% endfor
    }
    const uint m_own = m0 + (warp / ${WARPS_N}) * 64 + lane / 4;
    const uint n_own = (warp % ${WARPS_N}) * 64 + lane % 4 * 2;
${begin_results()}
% for i in FOUR:
% for h in range(2):
    {
        const uint m = m_own + ${16 * i + 8 * h};
        if (m < M) {
            const float own = scales ? row[row0 + m] : 1.0f;
            __global int *target = out + (size_t)m * N;
% for j in EIGHT:
${put_pair(f"n_own + {8 * j}", f"s{i}_{j}_{2 * h}", f"s{i}_{j}_{2 * h + 1}")}
% endfor
        }
    }
% endfor
% endfor
}
