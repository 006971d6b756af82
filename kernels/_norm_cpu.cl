// CPU shape of the norms: a work-item owns `per` rows and passes each, which its cache keeps, several times in vectors
// of eight.
<%def name="pass_over(step)">
        {
            uint j = 0;
            // Four sums, because each waits for the one before it.
            for (; j + 32 <= full; j += 32) {
% for i in range(4):
                ${step(i, f"j + {8 * i}")}
% endfor
            }
            for (; j < full; j += 8) {
                ${step(0, "j")}
            }
        }
</%def>
<%!
def operand(t, place, j, left=""):
    return f"load_left_{t}({place} + {j}, {left}, 0.0f)" if left else f"load_{t}({place} + {j})"

def weighted(t, j, left=""):
    return " * " + operand(t, "weight + weight0", j, left) if t else ""

def biased(t, j, left=""):
    return " + " + operand(t, "bias + bias0", j, left) if t else ""
%>
<%
def forward_sum(i, j):
    return f"{{ const vec v = load_{X}(source + {j}); sums[{i}] += {'v * v' if RMS else 'v'}; }}"

def forward_square(i, j):
    return f"{{ const vec v = load_{X}(source + {j}) - centre; sums[{i}] += v * v; }}"

ZEROS = "{(vec)(0.0f), (vec)(0.0f), (vec)(0.0f), (vec)(0.0f)}"
TOTAL = "vec_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))"
%>
% if NAME == "norm_forward":
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void norm_forward(${FORWARD}) {
    const uint full = n / 8 * 8;
    const uint left = n - full;
    ${begin_rows()}
        const __global ${stored(X)} *source = x + x0 + row * n;
        __global ${stored(X)} *target = y + y0 + row * n;
        vec sums[4] = ${ZEROS};
        ${pass_over(forward_sum)}
        if (left) {
            const vec v = load_left_${X}(source + full, left, 0.0f);
            sums[1] += ${"v * v" if RMS else "v"};
        }
% if RMS:
        const float centre = 0.0f;
        const float variance = ${TOTAL} / n;
% else:
        const float centre = ${TOTAL} / n;
        for (uint i = 0; i < 4; i++) sums[i] = (vec)(0.0f);
        ${pass_over(forward_square)}
        if (left) {
            const vec v = load_left_${X}(source + full, left, centre) - centre;
            sums[1] += v * v;
        }
        const float variance = ${TOTAL} / n;
        mean[mean0 + row] = centre;
% endif
        const float scale = 1.0f / sqrt(variance + eps);
        rstd[rstd0 + row] = scale;
        for (uint j = 0; j < full; j += 8) {
            store_${X}(target + j, (load_${X}(source + j) - centre) * scale${weighted(W, "j")}${biased(B, "j")});
        }
        if (left) {
            const vec v = load_left_${X}(source + full, left, 0.0f);
            const vec result = (v - centre) * scale${weighted(W, "full", "left")}${biased(B, "full", "left")};
            store_left_${X}(target + full, left, result);
        }
    ${end_rows()}
}
% endif

<%def name="backward_first(j, left)">
            vec g = ${operand(X, "g_row", j, left)};
            const vec xhat = (${operand(X, "x_row", j, left)} - centre) * scale;
% for part, value in (("weight_part", "g * xhat"), ("bias_part", "g"))[: PARTS * (1 if RMS else 2)]:
            vec ${part}_sum = ${value};
            if (row > first) ${part}_sum += ${operand("float32", part, j, left)};
            ${"store_left" if left else "store"}_float32(${part} + ${j}, ${left + ", " if left else ""}${part}_sum);
% endfor
            g = g${weighted(W, j, left)};
            ${"" if RMS else "sums += g;"}
            products += g * xhat;
</%def>
% if NAME == "norm_backward":
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void norm_backward(${BACKWARD}) {
    const uint full = n / 8 * 8;
    const uint left = n - full;
% if PARTS:
    __global float *weight_part = parts + get_global_id(0) * ${SUMS} * n;
    __global float *bias_part = weight_part + n;
% endif
    ${begin_rows()}
        const __global ${stored(X)} *g_row = grad_y + grad_y0 + row * n;
        const __global ${stored(X)} *x_row = x + x0 + row * n;
        __global ${stored(X)} *target = grad_x + grad_x0 + row * n;
        const float centre = ${"0.0f" if RMS else "mean[mean0 + row]"};
        const float scale = rstd[rstd0 + row];
        vec sums = (vec)(0.0f);
        vec products = (vec)(0.0f);
        for (uint j = 0; j < full; j += 8) {
            ${backward_first("j", "")}
        }
        if (left) {
            ${backward_first("full", "left")}
        }
        const float mean_g = vec_sum(sums) / n;
        const float mean_gx = vec_sum(products) / n;
        for (uint j = 0; j < full; j += 8) {
            const vec g = load_${X}(g_row + j)${weighted(W, "j")};
            const vec xhat = (load_${X}(x_row + j) - centre) * scale;
            store_${X}(target + j, scale * (g - mean_g - xhat * mean_gx));
        }
        if (left) {
            const vec g = load_left_${X}(g_row + full, left, 0.0f)${weighted(W, "full", "left")};
            const vec xhat = (load_left_${X}(x_row + full, left, 0.0f) - centre) * scale;
            store_left_${X}(target + full, left, scale * (g - mean_g - xhat * mean_gx));
        }
    ${end_rows()}
}
% endif
