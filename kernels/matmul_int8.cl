// Exact products of whole numbers of eight bits, both operands with the summed dimension last:
//
//   sum[m, n] = sum_k a[m*lda + k] * b[n*ldb + k]      a, b char, |a|, |b| <= 127, and what is summed stays below 2^31
//   scales 0: out int [M, N] = sum      1: out float [M, N] = (float)sum * row[m]      2: out = (float)sum * (row[m] * col[n])
//
//   forward      a = x by token              b = t [out, in]              row = scales of x, col = the weight's
//   grad_input   a = grad_out*scale by token b = t transposed [in, out]   row = scales of a
//   grad_weight  a = grad_out by column, transposed [out, M]   b = x by column, transposed [in, M]      row, col = scales of both
//
// The sums are exact, so neither their order nor who forms them matters: every device gives the same bytes. KIND forms them
//   "float"   by float32 multiply-adds, which every device does fast: products and sums of a block of K are whole numbers below
//             2^24, which float32 holds exactly, fused or not
//   "dot"     by cl_khr_integer_dot_product, four products a turn (GPU shape)
//   "mma", "wgmma"   by NVIDIA's tensor cores, in inline assembly (_int8_cores.cl)
//   "vnni"    by x86's instruction for it, in inline assembly (CPU shape, _int8_vnni.cl)
// Between blocks of K the sums wait in `out` itself, as int (tensor cores hold them). a begins a0 elements into its buffer, b b0, row
// row0. The gate (int64 [4], a layer's clock) ends everything at once where `gated` and gate[2], whether the step fires, is 0.
//
// Launched by memtrain_cl/ops/matmul_int8.py, add_chunk too. Constants: NAME (the one kernel to render), KIND, GPU (work-groups with
// tiles in local memory) or not (a work-item beside panels), and the shape's own, below.
//
// Compilers may contract: the only products that meet a sum are exact in it.

% if NAME == "add_chunk":
// total float [M, N] += (float)sums, chunk by chunk of a longer K: set at the first, scaled at the last. A work-item takes `per` elements.
__kernel void add_chunk(const __global int *sums, const __global float *row, const __global float *col, __global float *total,
                        const __global long *gate, const uint gated, const ulong row0, const ulong size, const uint N, const ulong per,
                        const uint first, const uint last) {
    if (gated && gate[2] == 0) return;
    const ulong begin = get_global_id(0) * per;
    const ulong end = min(begin + per, size);
    for (ulong i = begin; i < end; i++) {
        float sum = (float)sums[i];
        if (!first) sum = total[i] + sum;
        if (last) {
            const ulong m = i / N;
            sum = sum * (row[row0 + m] * col[i - m * N]);
        }
        total[i] = sum;
    }
}
% else:
<%def name="parameters()">
const __global char *a, const __global char *b, const __global float *row, const __global float *col, __global int *out,
                 const uint scales, const __global long *gate, const uint gated, const ulong a0, const ulong b0, const ulong row0,
                 const uint M, const uint N, const uint K, const uint lda, const uint ldb</%def>
// What goes to out: the sum of a block of K, and of those before it; the product's own bits at the last. own: of row, where it is read.
<%def name="due(sums, before, col, width)">
        if (!first) ${sums} += ${before};
        if (last && scales == 1) ${sums} = as_int${width}(convert_float${width}(${sums}) * own);
        if (last && scales == 2) ${sums} = as_int${width}(convert_float${width}(${sums}) * (own * ${col}));
</%def>
% if KIND in ("mma", "wgmma"):
#include "_int8_cores.cl"
% elif GPU:
#include "_int8_gpu.cl"
% else:
#include "_transpose.cl"
#include "_int8_cpu.cl"
% endif
% endif
