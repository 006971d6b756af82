// Exact products on tensor cores of compute capability 8.0 and above (_core_mma.cl).
<%
INSTRUCTION, SUM, KIND_OF_SUM = "m16n8k32.row.col.s32.s8.s8.s32", "int", "r"
%>
#include "_core_mma.cl"
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void matmul_int8(${parameters()}, const uint pairs) {
    __local uint4 tiles[${STAGES * STAGE // 16}];
    if (gated && gate[2] == 0) return;
${begin_block()}
${products()}
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
