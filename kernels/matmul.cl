// Matrix products with float32 accumulation whose right operand may be a packed counter weight, decoded on the way in.
//
//   out[m, n] = sum_k a[m, k] * b[k, n]
//   LEFT   "rows": a[m*lda + k]        "columns": a[k*lda + m]
//   RIGHT  "dense": b[k*ldb + n]       "counter": scale[k] * t[k, n]  (state row k)       "counter_t": scale[n] * t[n, k] (state row n)
//
//   forward      a = x, rows               b = counter_t       out [M, out]
//   grad_input   a = grad_out, rows        b = counter         out [M, in]
//   grad_weight  a = grad_out, columns     b = x, dense        out [R, in]
//
// No dense weight exists: a tile of it at most, in local memory. Launched by memtrain_cl/ops/matmul.py.
// Constants: GPU (work-groups with tiles of both operands in local memory) or not (a work-item with a register tile beside a
// decoded panel); LEFT, RIGHT, C, PACKED, ALIGNED (rows of a and dense b begin on 16 bytes), and the shape's own, below.
<%
VECTOR_WIDTHS = (1, 4) if GPU else (1, 4, 8)
%>
#include "_code6.cl"
#include "_counter_state.cl"

% if GPU:
#include "_matmul_gpu.cl"
% else:
#include "_matmul_cpu.cl"
% endif
