// 16-bit operands on tensor cores, by the instruction that CORES names (_core_mma.cl, _core_wgmma.cl): rows of both begin on sixteen bytes.
// The sums are float32, and rounded once.
<%
BYTES, DEPTH = 2, 64
DEEP = {"a": LEFT == "columns", "b": RIGHT == "dense"}
SOURCE, LEAD, FIRST, LAST = {"a": "left", "b": "right"}, {"a": "lda", "b": "ldb"}, "k_first", "k_last"
TYPE = {"float16": "f16", "bfloat16": "bf16"}[LEFT_TYPE]
SUM, MODES = "float", f", 1, 1, {int(DEEP['a'])}, {int(DEEP['b'])}"
INSTRUCTION = {"mma": f"m16n8k16.row.col.f32.{TYPE}.{TYPE}.f32", "wgmma": f"m64n256k16.f32.{TYPE}.{TYPE}"}
%>
#include "_core_copies.cl"
% if CORES == "mma":
#include "_core_mma.cl"
% else:
#include "_core_wgmma.cl"
% endif
<%doc>Two neighbouring sums of row m to their place, from column n0 + at on.</%doc>
<%def name="put_pair(at, x, y)">
            {
                const uint n = n0 + ${at};
                float2 sums = (float2)(${x}, ${y});
% if EPILOGUE:
                sums *= alpha;
                if (beta != 0.0f && n < N) {
                    const size_t at = m * add_m + n * add_n;
                    sums.x += beta * add_1(add, at);
                    if (n + 1 < N) sums.y += beta * add_1(add, at + add_n);
                }
% endif
                if (n + 1 < N && pairs) {
% if OUT_TYPE == "float32":
                    *(__global float2 *)(target + n) = sums;
% else:
                    uint both;
                    asm("cvt.rn.${TYPE}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(sums.y), "f"(sums.x));
                    *(__global uint *)(target + n) = both;
% endif
                } else if (n < N) {
                    out_store_1(sums.x, target, n);
                    if (n + 1 < N) out_store_1(sums.y, target, n + 1);
                }
            }
</%def>
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void matmul(${parameters()}) {
    __local uint4 tiles[${STAGES * STAGE // 16}] __attribute__((aligned(1024)));
    ${begin()}
${begin_block()}
${products_mma() if CORES == "mma" else products_wgmma()}
    // Every row begins on a pair.
    const bool pairs = N % 2 == 0 && (size_t)out % ${8 if OUT_TYPE == "float32" else 4} == 0;
% for m, sums in RESULTS:
    {
        const uint m = ${m};
        if (m < M) {
            __global ${stored(OUT_TYPE)} *target = out + (size_t)m * N;
% for at, x, y in sums:
${put_pair(at, x, y)}
% endfor
        }
    }
% endfor
}
