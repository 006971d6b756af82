// Softmax and logarithmic softmax along one dimension, and their backwards, in float32 whatever the elements' type.
//
//   softmax           y = exp(x - max) / sum(exp(x - max))        backward  grad_x = y * (grad_y - sum(grad_y * y))
//   LOG               y = x - max - log(sum(exp(x - max)))        backward  grad_x = grad_y - exp(y) * sum(grad_y)
//
// A row of -inf alone gives NaN, as torch has it, and with `safe` zeros. Operands are contiguous: [rows, n] for the row
// kernels, [outer, n, inner] for the column kernels. Launched by memtrain_cl/launchers/softmax.py. Constants: NAME (the one kernel to render), GPU or not,
// LOG, X (elements read), Y (elements read by backwards beside grad_y of type X, then written as Z), and those of
// _rows.cl. HELD: vectors of a row that a work-item of the GPU shape keeps in registers; 0 where rows are longer and
// are read twice.
<%
TYPES = (X, Y, Z)
%>
#include "_types.cl"
#include "_rows.cl"

// A maximum begins here and not at -inf, which would make -inf - -inf of rows that hold nothing else.
#define LOWEST (-FLT_MAX)

% if GPU:
<% STAGE = first_stage(LANES) %>
<%def name="merge(count, step, first)">
    float top = LOWEST;
    #pragma unroll
    for (uint i = 0; i < ${count}; i++) top = fmax(top, own[${first} + ${step} * i].x);
    float sum = 0.0f;
    #pragma unroll
    for (uint i = 0; i < ${count}; i++) sum += own[${first} + ${step} * i].y * exp(own[${first} + ${step} * i].x - top);
</%def>
// (maximum, sum of exponentials below it) of a row from those of its work-items.
inline float2 lanes_softmax(float2 value, __local float2 *own, uint lane) {
    own[lane] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < ${STAGE}) {
        ${merge(LANES // STAGE, STAGE, "lane")}
        own[${LANES} + lane] = (float2)(top, sum);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    ${merge(STAGE, 1, LANES)}
    return (float2)(top, sum);
}

% if NAME == "softmax":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void softmax(const __global ${stored(X)} *x, const ulong x0, __global ${stored(Z)} *out, const ulong out0, const uint n,
             const uint rows, const uint per, const uint safe) {
    ${begin_rows()}
        const __global ${stored(X)} *source = x + x0 + row * n;
        __global ${stored(Z)} *target = out + out0 + row * n;
% if HELD:
        vec held[${HELD}];
        vec tops = (vec)(LOWEST);
        ${begin_units()}
                held[k] = load_left_${X}(source + j, left, -INFINITY);
                tops = fmax(tops, held[k]);
        ${end_units()}
        const float top = vec_max(tops);
        vec sums = (vec)(0.0f);
        ${begin_units()}
                const vec e = exp(held[k] - top);
                sums += e;
                ${"" if LOG else "held[k] = e;"}
        ${end_units()}
        const float2 both = lanes_softmax((float2)(top, vec_sum(sums)), own, lane);
% else:
        float top = LOWEST;
        float sum = 0.0f;
        ${begin_units()}
                const vec v = load_left_${X}(source + j, left, -INFINITY);
                const float higher = fmax(top, vec_max(v));
                sum = sum * exp(top - higher) + vec_sum(exp(v - higher));
                top = higher;
        ${end_units()}
        const float2 both = lanes_softmax((float2)(top, sum), own, lane);
% endif
<%
VALUE = "held[k]" if HELD else f"load_left_{X}(source + j, left, 0.0f)"
if LOG:
    RESULT = f"({VALUE} - both.x) - logarithm"
else:
    RESULT = f"{VALUE} * factor" if HELD else f"exp({VALUE} - both.x) * factor"
%>
% if LOG:
        const float logarithm = log(both.y);
% else:
        // Exponentials in registers are below the work-item's maximum, not yet below the row's.
        const float factor = both.y == 0.0f && safe ? 0.0f : ${"exp(top - both.x)" if HELD else "1.0f"} / both.y;
% endif
        ${begin_units()}
                store_left_${Z}(target + j, left, ${RESULT});
        ${end_units()}
    ${end_rows()}
}
% endif

% if NAME == "softmax_backward":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void softmax_backward(const __global ${stored(X)} *grad_y, const ulong grad_y0, const __global ${stored(Y)} *y,
                      const ulong y0, __global ${stored(Z)} *grad_x, const ulong grad_x0, const uint n, const uint rows,
                      const uint per) {
    ${begin_rows()}
        const __global ${stored(X)} *g_row = grad_y + grad_y0 + row * n;
        const __global ${stored(Y)} *y_row = y + y0 + row * n;
        __global ${stored(Z)} *target = grad_x + grad_x0 + row * n;
        vec sums = (vec)(0.0f);
% if HELD:
        vec g[${HELD}];
        vec v[${HELD}];
        ${begin_units()}
                g[k] = load_left_${X}(g_row + j, left, 0.0f);
                v[k] = load_left_${Y}(y_row + j, left, 0.0f);
                sums += ${"g[k]" if LOG else "g[k] * v[k]"};
        ${end_units()}
% else:
        ${begin_units()}
                const vec g = load_left_${X}(g_row + j, left, 0.0f);
                sums += ${"g" if LOG else f"g * load_left_{Y}(y_row + j, left, 0.0f)"};
        ${end_units()}
% endif
        const float sum = lanes_sum((float2)(vec_sum(sums), 0.0f), own, lane).x;
        ${begin_units()}
                const vec g_now = ${"g[k]" if HELD else f"load_left_{X}(g_row + j, left, 0.0f)"};
                const vec y_now = ${"v[k]" if HELD else f"load_left_{Y}(y_row + j, left, 0.0f)"};
                store_left_${Z}(target + j, left, ${"g_now - exp(y_now) * sum" if LOG else "y_now * (g_now - sum)"});
        ${end_units()}
    ${end_rows()}
}
% endif
% else:
<%
# Exponentials wait in the result where it can hold them unrounded, and are worked out again where it cannot.
KEPT = Z == "float32" and not LOG
%>
% if NAME == "softmax":
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void softmax(const __global ${stored(X)} *x, const ulong x0, __global ${stored(Z)} *out, const ulong out0, const uint n,
             const uint rows, const uint per, const uint safe) {
    const uint full = n / 8 * 8;
    const uint left = n - full;
    ${begin_rows()}
        const __global ${stored(X)} *source = x + x0 + row * n;
        __global ${stored(Z)} *target = out + out0 + row * n;
        // Four maxima, because each waits for the one before it.
        vec tops[4] = {(vec)(LOWEST), (vec)(LOWEST), (vec)(LOWEST), (vec)(LOWEST)};
        uint j = 0;
        for (; j + 32 <= full; j += 32) {
% for i in range(4):
            tops[${i}] = max(tops[${i}], load_${X}(source + j + ${8 * i}));
% endfor
        }
        for (; j < full; j += 8) tops[0] = max(tops[0], load_${X}(source + j));
        if (left) tops[1] = max(tops[1], load_left_${X}(source + full, left, -INFINITY));
        const float top = vec_max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
        vec sums = (vec)(0.0f);
        for (j = 0; j < full; j += 8) {
            const vec e = vec_exp(load_${X}(source + j) - top);
            sums += e;
            ${f"store_{Z}(target + j, e);" if KEPT else ""}
        }
        if (left) {
            const vec e = vec_exp(load_left_${X}(source + full, left, -INFINITY) - top);
            sums += e;
            ${f"store_left_{Z}(target + full, left, e);" if KEPT else ""}
        }
        const float sum = vec_sum(sums);
% if LOG:
        const float logarithm = log(sum);
% else:
        const float factor = sum == 0.0f && safe ? 0.0f : 1.0f / sum;
% endif
<%
if LOG:
    RESULT = "({} - top) - logarithm"
elif KEPT:
    RESULT = "{} * factor"
else:
    RESULT = "vec_exp({} - top) * factor"
FULL, LEFT = f"load_{X}(source + j)", f"load_left_{X}(source + full, left, 0.0f)"
if KEPT:
    FULL, LEFT = f"load_{Z}(target + j)", f"load_left_{Z}(target + full, left, 0.0f)"
%>
        for (j = 0; j < full; j += 8) store_${Z}(target + j, ${RESULT.format(FULL)});
        if (left) store_left_${Z}(target + full, left, ${RESULT.format(LEFT)});
    ${end_rows()}
}
% endif

% if NAME == "softmax_backward":
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void softmax_backward(const __global ${stored(X)} *grad_y, const ulong grad_y0, const __global ${stored(Y)} *y,
                      const ulong y0, __global ${stored(Z)} *grad_x, const ulong grad_x0, const uint n, const uint rows,
                      const uint per) {
    const uint full = n / 8 * 8;
    const uint left = n - full;
    ${begin_rows()}
        const __global ${stored(X)} *g_row = grad_y + grad_y0 + row * n;
        const __global ${stored(Y)} *y_row = y + y0 + row * n;
        __global ${stored(Z)} *target = grad_x + grad_x0 + row * n;
        vec sums[4] = {(vec)(0.0f), (vec)(0.0f), (vec)(0.0f), (vec)(0.0f)};
        uint j = 0;
        for (; j + 32 <= full; j += 32) {
% for i in range(4):
            sums[${i}] += load_${X}(g_row + j + ${8 * i})${"" if LOG else f" * load_{Y}(y_row + j + {8 * i})"};
% endfor
        }
        for (; j < full; j += 8) sums[0] += load_${X}(g_row + j)${"" if LOG else f" * load_{Y}(y_row + j)"};
        vec g = (vec)(0.0f);
        vec v = (vec)(0.0f);
        if (left) {
            g = load_left_${X}(g_row + full, left, 0.0f);
            v = load_left_${Y}(y_row + full, left, 0.0f);
            sums[1] += ${"g" if LOG else "g * v"};
        }
        const float sum = vec_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (left) store_left_${Z}(target + full, left, ${"g - vec_exp(v) * sum" if LOG else "v * (g - sum)"});
        for (j = 0; j < full; j += 8) {
            g = load_${X}(g_row + j);
            v = load_${Y}(y_row + j);
            store_${Z}(target + j, ${"g - vec_exp(v) * sum" if LOG else "v * (g - sum)"});
        }
    ${end_rows()}
}
% endif
% endif

% if NAME == "softmax_columns":
// A work-item a column of [outer, n, inner], in both shapes: neighbours read neighbouring elements.
__kernel __attribute__((reqd_work_group_size(64, 1, 1)))
void softmax_columns(const __global ${stored(X)} *x, const ulong x0, __global ${stored(Z)} *out, const ulong out0,
                     const uint n, const ulong inner, const ulong columns, const uint safe) {
    const ulong column = get_global_id(0);
    if (column >= columns) return;
    const ulong outer = column / inner;
    const ulong first = outer * inner * n + (column - outer * inner);
    const __global ${stored(X)} *source = x + x0 + first;
    __global ${stored(Z)} *target = out + out0 + first;
    float top = LOWEST;
    float sum = 0.0f;
    for (uint i = 0; i < n; i++) {
        const float v = ${load(X, "source", "i * inner")};
        const float higher = fmax(top, v);
        sum = sum * exp(top - higher) + exp(v - higher);
        top = higher;
    }
% if LOG:
    const float logarithm = log(sum);
% else:
    const float factor = sum == 0.0f && safe ? 0.0f : 1.0f / sum;
% endif
    for (uint i = 0; i < n; i++) {
        const float v = ${load(X, "source", "i * inner")} - top;
        ${store(Z, "target", "i * inner", "v - logarithm" if LOG else "exp(v) * factor")};
    }
}
% endif

% if NAME == "softmax_backward_columns":
__kernel __attribute__((reqd_work_group_size(64, 1, 1)))
void softmax_backward_columns(const __global ${stored(X)} *grad_y, const ulong grad_y0, const __global ${stored(Y)} *y,
                              const ulong y0, __global ${stored(Z)} *grad_x, const ulong grad_x0, const uint n,
                              const ulong inner, const ulong columns) {
    const ulong column = get_global_id(0);
    if (column >= columns) return;
    const ulong outer = column / inner;
    const ulong first = outer * inner * n + (column - outer * inner);
    const __global ${stored(X)} *g_column = grad_y + grad_y0 + first;
    const __global ${stored(Y)} *y_column = y + y0 + first;
    __global ${stored(Z)} *target = grad_x + grad_x0 + first;
    float sum = 0.0f;
    for (uint i = 0; i < n; i++) {
        const float g = ${load(X, "g_column", "i * inner")};
        sum += ${"g" if LOG else "g * " + load(Y, "y_column", "i * inner")};
    }
    for (uint i = 0; i < n; i++) {
        const float g = ${load(X, "g_column", "i * inner")};
        const float v = ${load(Y, "y_column", "i * inner")};
        ${store(Z, "target", "i * inner", "g - exp(v) * sum" if LOG else "v * (g - sum)")};
    }
}
% endif
