// GPU shape of the norms: LANES work-items share a row and keep it in registers between the passes.

% if NAME == "norm_forward":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void norm_forward(${FORWARD}) {
    ${begin_rows()}
        const __global ${stored(X)} *source = x + x0 + row * n;
        __global ${stored(X)} *target = y + y0 + row * n;
        vec sums = (vec)(0.0f);
% if HELD:
        vec held[${HELD}];
% endif
        ${begin_units()}
                const vec v = load_left_${X}(source + j, left, 0.0f);
                sums += ${"v * v" if RMS else "v"};
                ${"held[k] = v;" if HELD else ""}
        ${end_units()}
        const float first_moment = lanes_sum((float2)(vec_sum(sums), 0.0f), own, lane).x / n;
% if RMS:
        const float variance = first_moment;
% else:
        sums = (vec)(0.0f);
        ${begin_units()}
% if not HELD:
                const vec v = load_left_${X}(source + j, left, first_moment);
% elif ALIGNED:
                const vec v = held[k];
% else:
                // Elements beyond the row's end must not count.
                vec v = held[k];
                if (left < 4) v = load_left_${X}(source + j, left, first_moment);
% endif
                sums += (v - first_moment) * (v - first_moment);
        ${end_units()}
        const float variance = lanes_sum((float2)(vec_sum(sums), 0.0f), own, lane).x / n;
% endif
        const float scale = 1.0f / sqrt(variance + eps);
        if (lane == 0 && units) {
            ${"" if RMS else "mean[mean0 + row] = first_moment;"}
            rstd[rstd0 + row] = scale;
        }
        ${begin_units()}
                const vec v = ${"held[k]" if HELD else f"load_left_{X}(source + j, left, 0.0f)"};
                vec result = ${"v" if RMS else "(v - first_moment)"} * scale;
                ${f"result *= load_left_{W}(weight + weight0 + j, left, 0.0f);" if W else ""}
                ${f"result += load_left_{B}(bias + bias0 + j, left, 0.0f);" if B else ""}
                store_left_${X}(target + j, left, result);
        ${end_units()}
    ${end_rows()}
}
% endif

% if NAME == "norm_backward":
// Where rows do not fit, the parts are added to in memory, each element by one work-item.
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void norm_backward(${BACKWARD}) {
% if PARTS and HELD:
    vec weight_sums[${HELD}];
    vec bias_sums[${HELD}];
    #pragma unroll
    for (uint k = 0; k < ${HELD}; k++) {
        weight_sums[k] = (vec)(0.0f);
        bias_sums[k] = (vec)(0.0f);
    }
% endif
% if PARTS:
    const size_t part = get_group_id(0) * ${SLOTS} + get_local_id(0) / ${LANES};
    __global float *weight_part = parts + part * ${SUMS} * n;
    __global float *bias_part = weight_part + n;
% endif
    ${begin_rows()}
        const __global ${stored(X)} *g_row = grad_y + grad_y0 + row * n;
        const __global ${stored(X)} *x_row = x + x0 + row * n;
        __global ${stored(X)} *target = grad_x + grad_x0 + row * n;
        const float centre = ${"0.0f" if RMS else "units ? mean[mean0 + row] : 0.0f"};
        const float scale = units ? rstd[rstd0 + row] : 0.0f;
        vec sums = (vec)(0.0f);
        vec products = (vec)(0.0f);
% if HELD:
        vec held_g[${HELD}];
        vec held_x[${HELD}];
% endif
        ${begin_units()}
                vec g = load_left_${X}(g_row + j, left, 0.0f);
                const vec xhat = (load_left_${X}(x_row + j, left, 0.0f) - centre) * scale;
% if PARTS and HELD:
                weight_sums[k] += g * xhat;
                bias_sums[k] += g;
% elif PARTS:
% for part, value in (("weight_part", "g * xhat"), ("bias_part", "g"))[:SUMS]:
                vec ${part}_sum = ${value};
                if (turn) ${part}_sum += load_left_float32(${part} + j, left, 0.0f);
                store_left_float32(${part} + j, left, ${part}_sum);
% endfor
% endif
                ${f"g *= load_left_{W}(weight + weight0 + j, left, 0.0f);" if W else ""}
                sums += g;
                products += g * xhat;
                ${"held_g[k] = g; held_x[k] = xhat;" if HELD else ""}
        ${end_units()}
        const float2 both = (float2)(${"0.0f" if RMS else "vec_sum(sums)"}, vec_sum(products));
        const float2 means = lanes_sum(both, own, lane) / n;
        ${begin_units()}
% if HELD:
                const vec g = held_g[k];
                const vec xhat = held_x[k];
% else:
                vec g = load_left_${X}(g_row + j, left, 0.0f);
                const vec xhat = (load_left_${X}(x_row + j, left, 0.0f) - centre) * scale;
                ${f"g *= load_left_{W}(weight + weight0 + j, left, 0.0f);" if W else ""}
% endif
                store_left_${X}(target + j, left, scale * (g - means.x - xhat * means.y));
        ${end_units()}
    ${end_rows()}
% if PARTS and HELD:
    const uint units = (n - 1) / 4 + 1;
    ${begin_units()}
                store_left_float32(weight_part + j, left, weight_sums[k]);
                ${"" if RMS else "store_left_float32(bias_part + j, left, bias_sums[k]);"}
    ${end_units()}
% endif
}
% endif
