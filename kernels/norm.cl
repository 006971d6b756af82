// Layer and root-mean-square norms over rows [rows, n], and their backwards, in float32 whatever the elements' type.
//
//   layer   y = (x - mean) * rstd * weight + bias     rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//   RMS     y = x * rstd * weight                     rstd = 1 / sqrt(mean(x^2) + eps)
//   backward, with xhat = (x - mean) * rstd and gw = grad_y * weight, and without mean(gw) for RMS:
//           grad_x = rstd * (gw - mean(gw) - xhat * mean(gw * xhat))
//           grad_weight = sum over rows of grad_y * xhat         grad_bias = sum over rows of grad_y
//
// The sums over rows go through parts [parts, 2 (RMS: 1), n] float32: a part is what one work-item of a CPU, or the
// work-items that share a row on a GPU, added up over all its rows. column_sums.cl adds the parts in their order, so
// that a result repeats bit for bit. Launched by memtrain_cl/launchers/norm.py. Constants: NAME (the one kernel to render), GPU or not, RMS, X (elements of x
// and y), W and B (elements of weight and bias, "" without), PARTS (whether the backward sums over rows), and those of
// _rows.cl. HELD: vectors of a row that a work-item of the GPU shape keeps in registers; 0 where rows are longer and
// are read again for each pass.
<%
TYPES = tuple(t for t in (X, W, B, "float32") if t)
SUMS = 1 if RMS else 2
FORWARD = f"""const __global {stored(X)} *x, const ulong x0, const __global {stored(W or X)} *weight,
                  const ulong weight0, const __global {stored(B or X)} *bias, const ulong bias0,
                  __global {stored(X)} *y, const ulong y0, __global float *mean, const ulong mean0,
                  __global float *rstd, const ulong rstd0, const uint n, const uint rows, const uint per,
                  const float eps"""
BACKWARD = f"""const __global {stored(X)} *grad_y, const ulong grad_y0, const __global {stored(X)} *x, const ulong x0,
                  const __global float *mean, const ulong mean0, const __global float *rstd, const ulong rstd0,
                  const __global {stored(W or X)} *weight, const ulong weight0, __global {stored(X)} *grad_x,
                  const ulong grad_x0, __global float *parts, const uint n, const uint rows, const uint per"""
%>
#include "_types.cl"
#include "_rows.cl"

% if GPU:
#include "_norm_gpu.cl"
% else:
#include "_norm_cpu.cl"
% endif
