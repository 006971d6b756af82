// Norms whose weight belongs to a channel: group norm and batch norm over [images, channels, space], and their
// backwards.
//
// A plane is one channel of one image, `space` contiguous elements: plane = image * channels + channel. Statistics
// belong to rows of planes: a group norm's row is `per_statistic` neighbouring planes (a group), a batch norm's is a
// channel's planes in all images. Plane p reads statistic p / per_statistic % statistics.
//
//   moments          mean, variance, rstd = 1 / sqrt(variance + eps) of each row
//   normalize_planes y = (x - mean) * rstd * weight + bias
//   backward_sums    of each row of planes: sum(grad_y * xhat) and sum(grad_y), xhat = (x - mean) * rstd
//   coefficients     of each statistic: plain = sum over its channels of weight * sum(grad_y), products = that of
//                    weight * sum(grad_y * xhat), both divided by its elements
//   backward         grad_x = rstd * (weight * grad_y - plain - xhat * products)
//
// Where the statistics were running ones, grad_x = rstd * weight * grad_y: the coefficients are zero. Launched by
// memtrain_cl/launchers/channel_norm.py. Constants: NAME (the one kernel to render), GPU or not, X (elements of x and y), W and B (elements of weight and
// bias, "" without), R (elements of running statistics, "" without), and those of _rows.cl. A row is one plane, except
// in moments and backward_sums: `segments` stretches of n elements.
<%
TYPES = tuple(t for t in (X, "float32") if t)
%>
#include "_types.cl"
#include "_rows.cl"

% if not GPU:
// A work-item has a row for itself: the loops of the GPU shape with one lane.
inline float2 lanes_sum(float2 value, float2 *own, uint lane) { return value; }
% endif
<%def name="begin()">
    ${begin_rows()}
% if not GPU:
        const uint lane = 0;
        const uint units = (n - 1) / 8 + 1;
        float2 *own = 0;
% endif
</%def>
<%def name="begin_segments()">
        // `across` lanes walk a stretch while the others walk the next ones.
        for (uint segment = lane / across; segment < segments; segment += ${LANES} / across) {
            const size_t start = row * row_stride + segment * segment_stride;
            for (uint unit = lane % across; unit < units; unit += across) {
                const uint left = n - ${WIDTH} * unit;
                const size_t at = start + ${WIDTH} * (size_t)unit;
</%def>
<%def name="end_segments()">
            }
        }
</%def>
% if NAME == "moments":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void moments(const __global ${stored(X)} *x, const ulong x0, __global float *mean, __global float *rstd,
             __global ${stored(R or "float32")} *running_mean, const ulong running_mean0,
             __global ${stored(R or "float32")} *running_var, const ulong running_var0, const uint n, const uint rows,
             const uint per, const uint across, const uint segments, const ulong row_stride, const ulong segment_stride,
             const float eps, const float momentum) {
    const float count = (float)segments * n;
    ${begin()}
        vec sums = (vec)(0.0f);
        ${begin_segments()}
                sums += load_left_${X}(x + x0 + at, left, 0.0f);
        ${end_segments()}
        const float centre = lanes_sum((float2)(vec_sum(sums), 0.0f), own, lane).x / count;
        sums = (vec)(0.0f);
        ${begin_segments()}
                const vec v = load_left_${X}(x + x0 + at, left, centre) - centre;
                sums += v * v;
        ${end_segments()}
        const float squares = lanes_sum((float2)(vec_sum(sums), 0.0f), own, lane).x;
        if (lane == 0 && units) {
            mean[row] = centre;
            rstd[row] = 1.0f / sqrt(squares / count + eps);
% if R:
            // Running statistics take the variance of a sample.
            const float old_mean = ${load(R, "running_mean", "running_mean0 + row")};
            const float old_var = ${load(R, "running_var", "running_var0 + row")};
            const float new_mean = old_mean + momentum * (centre - old_mean);
            const float new_var = (1.0f - momentum) * old_var + momentum * (squares / (count - 1.0f));
            ${store(R, "running_mean", "running_mean0 + row", "new_mean")};
            ${store(R, "running_var", "running_var0 + row", "new_var")};
% endif
        }
    ${end_rows()}
}
% endif

% if NAME == "normalize_planes":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void normalize_planes(const __global ${stored(X)} *x, const ulong x0, const __global float *mean, const ulong mean0,
                      const __global float *rstd, const ulong rstd0, const __global ${stored(W or X)} *weight,
                      const ulong weight0, const __global ${stored(B or X)} *bias, const ulong bias0,
                      __global ${stored(X)} *y, const ulong y0, const uint n, const uint rows, const uint per,
                      const uint per_statistic, const uint statistics, const uint channels) {
    ${begin()}
        const size_t statistic = row / per_statistic % statistics;
        const size_t channel = row % channels;
        const float centre = units ? mean[mean0 + statistic] : 0.0f;
        float scale = units ? rstd[rstd0 + statistic] : 0.0f;
        float shift = 0.0f;
% if W:
        if (units) scale *= ${load(W, "weight", "weight0 + channel")};
% endif
% if B:
        if (units) shift = ${load(B, "bias", "bias0 + channel")};
% endif
        for (uint unit = lane; unit < units; unit += ${LANES}) {
            const uint left = n - ${WIDTH} * unit;
            const size_t at = row * n + ${WIDTH} * (size_t)unit;
            store_left_${X}(y + y0 + at, left, (load_left_${X}(x + x0 + at, left, 0.0f) - centre) * scale + shift);
        }
    ${end_rows()}
}
% endif

% if NAME == "backward_sums":
// sums float32 [images, 2, channels] of a group norm, whose rows are planes, and [1, 2, channels] of a batch norm.
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void backward_sums(const __global ${stored(X)} *grad_y, const ulong grad_y0, const __global ${stored(X)} *x,
                   const ulong x0, const __global float *mean, const ulong mean0, const __global float *rstd,
                   const ulong rstd0, __global float *sums, const uint n, const uint rows, const uint per,
                   const uint across, const uint segments, const ulong row_stride, const ulong segment_stride,
                   const uint per_statistic, const uint channels) {
    ${begin()}
        const size_t statistic = row / per_statistic;
        const float centre = units ? mean[mean0 + statistic] : 0.0f;
        const float scale = units ? rstd[rstd0 + statistic] : 0.0f;
        vec products = (vec)(0.0f);
        vec plain = (vec)(0.0f);
        ${begin_segments()}
                const vec g = load_left_${X}(grad_y + grad_y0 + at, left, 0.0f);
                products += g * ((load_left_${X}(x + x0 + at, left, 0.0f) - centre) * scale);
                plain += g;
        ${end_segments()}
        const float2 both = lanes_sum((float2)(vec_sum(products), vec_sum(plain)), own, lane);
        if (lane == 0 && units) {
            const size_t image = row / channels;
            sums[row + image * channels] = both.x;
            sums[row + (image + 1) * channels] = both.y;
        }
    ${end_rows()}
}
% endif

% if NAME == "coefficients":
// A work-item a statistic.
__kernel void coefficients(const __global float *sums, const __global ${stored(W or X)} *weight, const ulong weight0,
                           __global float *products, __global float *plain, const uint per_statistic,
                           const uint channels, const float count) {
    const size_t statistic = get_global_id(0);
    const size_t first = statistic * per_statistic;
    const size_t image = first / channels;
    float2 both = (float2)(0.0f);
    for (size_t plane = first; plane < first + per_statistic; plane++) {
        const float2 own = (float2)(sums[plane + image * channels], sums[plane + (image + 1) * channels]);
        both += own${" * " + load(W, "weight", "weight0 + plane - image * channels") if W else ""};
    }
    products[statistic] = both.x / count;
    plain[statistic] = both.y / count;
}
% endif

% if NAME == "backward":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void backward(const __global ${stored(X)} *grad_y, const ulong grad_y0, const __global ${stored(X)} *x, const ulong x0,
              const __global float *mean, const ulong mean0, const __global float *rstd, const ulong rstd0,
              const __global ${stored(W or X)} *weight, const ulong weight0, const __global float *products,
              const __global float *plain, __global ${stored(X)} *grad_x, const ulong grad_x0, const uint n,
              const uint rows, const uint per, const uint per_statistic, const uint statistics, const uint channels,
              const uint running) {
    ${begin()}
        const size_t statistic = row / per_statistic % statistics;
        const size_t channel = row % channels;
        const float centre = units ? mean[mean0 + statistic] : 0.0f;
        const float scale = units ? rstd[rstd0 + statistic] : 0.0f;
        const float of_product = units && !running ? products[statistic] : 0.0f;
        const float of_plain = units && !running ? plain[statistic] : 0.0f;
        float factor = 1.0f;
% if W:
        if (units) factor = ${load(W, "weight", "weight0 + channel")};
% endif
        for (uint unit = lane; unit < units; unit += ${LANES}) {
            const uint left = n - ${WIDTH} * unit;
            const size_t at = row * n + ${WIDTH} * (size_t)unit;
            const vec g = load_left_${X}(grad_y + grad_y0 + at, left, 0.0f) * factor;
            const vec xhat = (load_left_${X}(x + x0 + at, left, 0.0f) - centre) * scale;
            store_left_${X}(grad_x + grad_x0 + at, left, scale * (g - of_plain - xhat * of_product));
        }
    ${end_rows()}
}
% endif

% if NAME == "inverse_deviation":
// rstd = 1 / sqrt(variance + eps), of running variances.
__kernel void inverse_deviation(const __global ${stored(R or "float32")} *variance, const ulong variance0,
                                __global float *rstd, const float eps) {
    const size_t i = get_global_id(0);
    rstd[i] = 1.0f / sqrt(${load(R or "float32", "variance", "variance0 + i")} + eps);
}
% endif
