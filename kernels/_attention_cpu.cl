// CPU shape: LANES rows stay with an item, see _attention_lanes.cl for how.
#include "_attention_lanes.cl"

% if KERNEL == "forward":
// Item bh * blocks + block.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention_forward(${input_arguments()}
                       __global ${stored(TYPE)} *out, const ulong4 out_place, __global float *lse, const uint8 sizes,
                       const float scale2 ${dropout_arguments()}) {
    ${item_begin("T", "H")}
    const uint bh = outer;
    const uint h = bh - b * H;
    k += place_of(k_place, b, h / share);
    v += place_of(v_place, b, h / share);
% if MASK:
    const size_t mask_at = place_of(mask_place, b, h);
% endif
    float queries[${HEAD} * LANES];
    keep_rows(queries, q + place_of(q_place, b, h) + q_place.w * own0, q_place.w, own_count, D);
    ${clear("result")}
% if WIDEN:
    float k_rows[${ROWS * HEAD}];
    float v_rows[${ROWS * HEAD}];
% endif
% for n in V8:
    float8 most${n} = (float8)(-INFINITY);
    float8 total${n} = (float8)(0.0f);
% endfor
    float shrink[LANES];
    const uint end = causal ? min(S, own0 + own_count) : S;
    for (uint other0 = 0; other0 < end; other0 += ${ROWS}) {
        const uint count = min(end - other0, ${ROWS}u);
        ${passing("k", "k + k_place.w * other0", "k_place.w", "D")}
        products(tile, queries, k_rows, k_stride, count, D);
% for n in V8:
        float8 top${n} = most${n};
% endfor
        <%call expr="item_scores('i')">
% for n in V8:
            top${n} = fmax(top${n}, score${n});
% endfor
        </%call>
% for n in V8:
        // A row that has seen nothing yet has no maximum to subtract.
        const float8 base${n} = select(top${n}, (float8)(0.0f), top${n} == -INFINITY);
        const float8 less${n} = exp2_8(most${n} - base${n});
        most${n} = top${n};
        total${n} *= less${n};
        vstore8(less${n}, ${n}, shrink);
% endfor
        for (uint r = 0; r < count; r++) {
% for n in V8:
            const float8 p${n} = exp2_8(vload8(${len(V8)} * r + ${n}, tile) - base${n});
            total${n} += p${n};
            vstore8(p${n}, ${len(V8)} * r + ${n}, tile);
% endfor
            ${item_drop("tile", "i")}
        }
        ${passing("v", "v + v_place.w * other0", "v_place.w", "V")}
        accumulate(result, tile, v_rows, v_stride, count, V, shrink);
    }
    float level[LANES];
% for n in V8:
    const float8 inverse${n} = select(1.0f / total${n}, (float8)(0.0f), total${n} == 0.0f);
    vstore8(select(most${n} / ${LOG2E} + log(total${n}), (float8)(INFINITY), total${n} == 0.0f), ${n}, level);
% endfor
    for (uint lane = 0; lane < own_count; lane++) lse[(size_t)bh * T + own0 + lane] = level[lane];
    ${finish("result", "inverse{}".format, "V")}
    write_rows(out + place_of(out_place, b, h) + out_place.w * own0, out_place.w, own_count, V, result);
}
% elif KERNEL == "grad_query":
// Item bh * blocks + block.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention_grad_query(${backward_arguments()}
                          __global ${stored(TYPE)} *grad_q, const ulong4 grad_q_place,
                          const uint8 sizes, const float scale, const float scale2 ${dropout_arguments()}) {
    ${item_begin("T", "H")}
    const uint bh = outer;
    const uint h = bh - b * H;
    k += place_of(k_place, b, h / share);
    v += place_of(v_place, b, h / share);
% if MASK:
    const size_t mask_at = place_of(mask_place, b, h);
% endif
    float queries[${HEAD} * LANES];
    float grads[${HEAD} * LANES];
    keep_rows(queries, q + place_of(q_place, b, h) + q_place.w * own0, q_place.w, own_count, D);
    keep_rows(grads, grad_out + place_of(grad_out_place, b, h) + grad_out_place.w * own0, grad_out_place.w, own_count, V);
    ${clear("result")}
    float tile_grad[${ROWS} * LANES];
% if WIDEN:
    float k_rows[${ROWS * HEAD}];
    float v_rows[${ROWS * HEAD}];
% endif
    float level[LANES], below[LANES], one[LANES];
    for (uint lane = 0; lane < LANES; lane++) {
        const size_t row = (size_t)bh * T + own0 + min(lane, own_count - 1);
        level[lane] = lse[row] * ${LOG2E};
        below[lane] = delta[row];
        one[lane] = 1.0f;
    }
    const uint end = causal ? min(S, own0 + own_count) : S;
    for (uint other0 = 0; other0 < end; other0 += ${ROWS}) {
        const uint count = min(end - other0, ${ROWS}u);
        ${passing("k", "k + k_place.w * other0", "k_place.w", "D")}
        ${passing("v", "v + v_place.w * other0", "v_place.w", "V")}
        products(tile, queries, k_rows, k_stride, count, D);
        products(tile_grad, grads, v_rows, v_stride, count, V);
        <%call expr="item_scores('i')">
            ${item_drop("tile_grad", "i")}
% for n in V8:
            const float8 slope${n} = vload8(${len(V8)} * r + ${n}, tile_grad) - vload8(${n}, below);
            vstore8(exp2_8(score${n} - vload8(${n}, level)) * slope${n}, ${len(V8)} * r + ${n}, tile);
% endfor
        </%call>
        accumulate(result, tile, k_rows, k_stride, count, D, one);
    }
    ${finish("result", "scale".format, "D")}
    write_rows(grad_q + place_of(grad_q_place, b, h) + grad_q_place.w * own0, grad_q_place.w, own_count, D, result);
}
% else:
// Item (b * key heads * blocks + block): grad_k, grad_v or both, as KERNEL says ("grad_key", "grad_value",
// "grad_key_value"). Query heads that share a key head are summed in order.
<%
KEY = KERNEL != "grad_value"
VALUE = KERNEL != "grad_key"
%>
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention_${KERNEL}(${backward_arguments()}
% if KEY:
                         __global ${stored(TYPE)} *grad_k, const ulong4 grad_k_place,
% endif
% if VALUE:
                         __global ${stored(TYPE)} *grad_v, const ulong4 grad_v_place,
% endif
                         const uint8 sizes, const float scale, const float scale2 ${dropout_arguments()}) {
    ${item_begin("S", "(H / share)")}
    const uint g = outer - b * (H / share);
    float keys[${HEAD} * LANES];
    keep_rows(keys, k + place_of(k_place, b, g) + k_place.w * own0, k_place.w, own_count, D);
% if KEY:
    float values[${HEAD} * LANES];
    keep_rows(values, v + place_of(v_place, b, g) + v_place.w * own0, v_place.w, own_count, V);
    ${clear("key")}
% endif
% if VALUE:
    ${clear("value")}
% endif
    float tile_grad[${ROWS} * LANES];
% if WIDEN:
    float q_rows[${ROWS * HEAD}];
    float g_rows[${ROWS * HEAD}];
% endif
    float one[LANES];
    for (uint lane = 0; lane < LANES; lane++) one[lane] = 1.0f;
    for (uint h = g * share; h < (g + 1) * share; h++) {
        const size_t bh = (size_t)b * H + h;
        const __global ${stored(TYPE)} *qh = q + place_of(q_place, b, h);
        const __global ${stored(TYPE)} *gh = grad_out + place_of(grad_out_place, b, h);
% if MASK:
        const size_t mask_at = place_of(mask_place, b, h);
% endif
        for (uint other0 = causal ? own0 : 0; other0 < T; other0 += ${ROWS}) {
            const uint count = min(T - other0, ${ROWS}u);
            const __global float *level = lse + bh * T + other0;
            const __global float *below = delta + bh * T + other0;
            ${passing("q", "qh + q_place.w * other0", "q_place.w", "D")}
            ${passing("g", "gh + grad_out_place.w * other0", "grad_out_place.w", "V")}
            products(tile, keys, q_rows, q_stride, count, D);
% if KEY:
            products(tile_grad, values, g_rows, g_stride, count, V);
% endif
            <%call expr="item_scores('j')">
% for n in V8:
            const float8 p${n} = exp2_8(score${n} - level[r] * ${LOG2E});
            vstore8(p${n}, ${len(V8)} * r + ${n}, tile);
% endfor
% if VALUE:
            ${item_drop("tile", "j")}
% endif
% if KEY:
            ${item_drop("tile_grad", "j")}
% for n in V8:
            vstore8(p${n} * (vload8(${len(V8)} * r + ${n}, tile_grad) - below[r]), ${len(V8)} * r + ${n}, tile_grad);
% endfor
% endif
            </%call>
% if VALUE:
            accumulate(value, tile, g_rows, g_stride, count, V, one);
% endif
% if KEY:
            accumulate(key, tile_grad, q_rows, q_stride, count, D, one);
% endif
        }
    }
% if KEY:
    ${finish("key", "scale".format, "D")}
    write_rows(grad_k + place_of(grad_k_place, b, g) + grad_k_place.w * own0, grad_k_place.w, own_count, D, key);
% endif
% if VALUE:
    write_rows(grad_v + place_of(grad_v_place, b, g) + grad_v_place.w * own0, grad_v_place.w, own_count, V, value);
% endif
}
% endif
