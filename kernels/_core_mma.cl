// Products on tensor cores of compute capability 8.0 and above, by NVIDIA's inline PTX: a warp computes 64 x 64 of a block (_core_copies.cl)
// as 4 x 8 products of 16 x 8 sums over 32 bytes of K. While a part of 32 bytes of a stage is multiplied, the next one comes to
// registers. What a lane holds of both operands is what ldmatrix gives it, transposed where K runs down a tile's rows; of the sums
// rows lane/4 and lane/4 + 8, columns 2*(lane%4) and the next, of each 16 x 8 block.
//
// The includer says: SUM, the sums' type, and INSTRUCTION["mma"], the product's name in PTX. RESULTS: what a lane has in the end, as (row,
// [(column, two neighbouring sums)]) with rows in the result and columns in the block.
<%
FOUR = range(4)
EIGHT = range(8)
# Parts of a stage, and the copies of the next one that go with each but the last.
PARTS = 4
SHARE = -(-len(COPIES) // (PARTS - 1))
RESULTS = [
    (f"m_own + {16 * i + 8 * h}", [(f"n_own + {8 * j}", f"s{i}_{j}_{2 * h}", f"s{i}_{j}_{2 * h + 1}") for j in EIGHT])
    for i in FOUR for h in range(2)
]
%>
<%doc>Registers of four 8 x 8 matrices of 16 bits, of operand `name` at place i of part `part`.</%doc>
<%def name="load_four(names, name, i, part)">
<% along, turned = (part, i) if DEEP[name] else (i, part) %>\
            asm volatile("ldmatrix.sync.aligned.m8n8.x4${".trans" if DEEP[name] else ""}.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : ${", ".join(f'"=r"({register})' for register in names)} : "r"(stage_at + own_${name} + ${16 * ROW * along} + ((half_${name} ^ ${2 * turned}) << 4)) : "memory");
</%def>
<%doc>A warp's part of both operands into one of its two sets of registers.</%doc>
<%def name="load_part(stage, part)">
<% S = part % 2 %>
        {
            const uint stage_at = ${stage};
% for i in FOUR:
${load_four([f"a{S}_{i}_{e}" for e in FOUR], "a", i, part)}
% endfor
% for j in FOUR:
${load_four([f"b{S}_{n}_{e}" for n in (2 * j, 2 * j + 1) for e in range(2)], "b", j, part)}
% endfor
        }
</%def>
<%doc>The registers, and all products of the block: after begin_block, up to the sums.</%doc>
<%def name="products_mma()">
    const uint warp_m = warp / ${WARPS_N};
    const uint warp_n = warp % ${WARPS_N};
    // Where a lane's rows of the warp's part begin, and the exchanged number of its chunk in the first part.
% if DEEP["a"]:
    const uint own_a = warp_m * ${PANEL} + ((lane & 7) + ((lane >> 4) << 3)) * ${ROW};
    const uint half_a = (lane & 7) ^ ((lane >> 3) & 1);
% else:
    const uint own_a = (warp_m * 64 + (lane & 15)) * ${ROW};
    const uint half_a = (lane & 7) ^ (lane >> 4);
% endif
% if DEEP["b"]:
    const uint own_b = ${BEGIN["b"]} + warp_n * ${PANEL} + (lane & 15) * ${ROW};
    const uint half_b = (lane & 7) ^ (lane >> 4);
% else:
    const uint own_b = ${BEGIN["b"]} + (warp_n * 64 + (lane & 7) + ((lane >> 4) << 3)) * ${ROW};
    const uint half_b = (lane & 7) ^ ((lane >> 3) & 1);
% endif
% for i in FOUR:
% for j in EIGHT:
    ${SUM} ${", ".join(f"s{i}_{j}_{e} = 0" for e in FOUR)};
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
        const uint stage = tiles_at + turn % ${STAGES} * ${STAGE};
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
        const uint next = tiles_at + (turn + 1) % ${STAGES} * ${STAGE};
${load_part("next", 0)}
% endif
% for j in EIGHT:
% for i in FOUR:
        asm("mma.sync.aligned.${INSTRUCTION["mma"]} {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : ${", ".join(f'"+{REGISTER[SUM]}"(s{i}_{j}_{e})' for e in FOUR)}
            : ${", ".join(f'"r"(a{part % 2}_{i}_{e})' for e in FOUR)}, "r"(b${part % 2}_${j}_0), "r"(b${part % 2}_${j}_1));
% endfor
% endfor
% endfor
    }
    const uint m_own = m0 + warp_m * 64 + lane / 4;
    const uint n_own = warp_n * 64 + lane % 4 * 2;
</%def>
