// GPU shape: 64 rows stay with a group of 128 items, see _attention_tiles.cl for who holds what.
#include "_attention_tiles.cl"

% if KERNEL == "forward":
// Group (bh * blocks + block, slice): the last block first, since causality gives it most to do.
__kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void attention_forward(${input_arguments()}
                       __global ${stored(TYPE)} *out, const ulong4 out_place, __global float *lse, const uint8 sizes,
                       const float scale2 ${dropout_arguments()}) {
    ${group_begin()}
    const uint blocks = (T + ROWS - 1) / ROWS;
    const uint bh = get_group_id(0) / blocks;
    const uint own0 = ROWS * (blocks - 1 - (get_group_id(0) - bh * blocks));
    const uint b = bh / H;
    const uint h = bh - b * H;
    const uint c0 = get_group_id(1) * ${SLICE};
    q += place_of(q_place, b, h) + q_place.w * own0;
    k += place_of(k_place, b, h / share);
    v += place_of(v_place, b, h / share);
    out += place_of(out_place, b, h);
% if MASK:
    const size_t mask_at = place_of(mask_place, b, h);
% endif
% for v in range(2):
    float4 most${v} = (float4)(-INFINITY);
    float4 total${v} = (float4)(0.0f);
% endfor
% for c, v in RESULT:
    float4 sum${c}_${v} = (float4)(0.0f);
% endfor
    const uint end = causal ? min(S, own0 + ROWS) : S;
    for (uint other0 = 0; other0 < end; other0 += ROWS) {
        ${tile_products("s", "q", "q_place.w", "T - own0", "k + k_place.w * other0", "k_place.w", "S - other0", "D")}
        ${tile_scores("i")}
% for v in range(2):
        *(__local float4 *)(stage + 64 * x + 4 * (y ^ (x & 7)) + ${32 * v}) =
            fmax(fmax(s0_${v}, s1_${v}), fmax(s2_${v}, s3_${v}));
% endfor
        barrier(CLK_LOCAL_MEM_FENCE);
% for v in range(2):
        float4 top${v} = most${v};
% endfor
        #pragma unroll
        for (uint other = 0; other < 16; other++) {
% for v in range(2):
            top${v} = fmax(top${v}, *(const __local float4 *)(stage + 64 * other + 4 * (y ^ (other & 7)) + ${32 * v}));
% endfor
        }
% for v in range(2):
        // A row that has seen nothing yet has no maximum to subtract.
        float4 base${v} = top${v};
% for e in range(4):
        if (base${v}.s${e} == -INFINITY) base${v}.s${e} = 0.0f;
% endfor
        const float4 shrink${v} = exp2(most${v} - base${v});
        most${v} = top${v};
% for c in range(4):
        s${c}_${v} = exp2(s${c}_${v} - base${v});
% endfor
        total${v} = total${v} * shrink${v} + ((s0_${v} + s1_${v}) + (s2_${v} + s3_${v}));
% endfor
% for c, v in RESULT:
        sum${c}_${v} *= shrink${v};
% endfor
        ${tile_drop("s", "i")}
        ${publish("s")}
        ${tile_accumulate("sum", "v + v_place.w * other0", "v_place.w", "(S - other0)", "V")}
    }
% for v in range(2):
    *(__local float4 *)(stage + 64 * x + 4 * (y ^ (x & 7)) + ${32 * v}) = total${v};
% endfor
    barrier(CLK_LOCAL_MEM_FENCE);
% for v in range(2):
    total${v} = (float4)(0.0f);
% endfor
    #pragma unroll
    for (uint other = 0; other < 16; other++) {
% for v in range(2):
        total${v} += *(const __local float4 *)(stage + 64 * other + 4 * (y ^ (other & 7)) + ${32 * v});
% endfor
    }
% for v in range(2):
    float4 inverse${v} = 1.0f / total${v};
% for e in range(4):
    if (total${v}.s${e} == 0.0f) inverse${v}.s${e} = 0.0f;
    if (x == 0 && get_group_id(1) == 0 && own0 + 4 * y + ${32 * v + e} < T) {
        const float natural = (most${v}.s${e} + log2(total${v}.s${e})) / ${LOG2E};
        lse[(size_t)bh * T + own0 + 4 * y + ${32 * v + e}] = total${v}.s${e} == 0.0f ? INFINITY : natural;
    }
% endfor
% endfor
% for c, v in RESULT:
    sum${c}_${v} *= inverse${v};
% endfor
    ${write_result("sum", "out", "out_place", "T", "V")}
}
% elif KERNEL == "grad_query":
// Group (bh * blocks + block, slice of D): the last block first.
__kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void attention_grad_query(${backward_arguments()}
                          __global ${stored(TYPE)} *grad_q, const ulong4 grad_q_place,
                          const uint8 sizes, const float scale, const float scale2 ${dropout_arguments()}) {
    ${group_begin()}
    const uint blocks = (T + ROWS - 1) / ROWS;
    const uint bh = get_group_id(0) / blocks;
    const uint own0 = ROWS * (blocks - 1 - (get_group_id(0) - bh * blocks));
    const uint b = bh / H;
    const uint h = bh - b * H;
    const uint c0 = get_group_id(1) * ${SLICE};
    q += place_of(q_place, b, h) + q_place.w * own0;
    k += place_of(k_place, b, h / share);
    v += place_of(v_place, b, h / share);
    grad_out += place_of(grad_out_place, b, h) + grad_out_place.w * own0;
    grad_q += place_of(grad_q_place, b, h);
% if MASK:
    const size_t mask_at = place_of(mask_place, b, h);
% endif
% for v in range(2):
    float4 lse${v} = (float4)(INFINITY);
    float4 delta${v} = (float4)(0.0f);
% for e in range(4):
    if (own0 + 4 * y + ${32 * v + e} < T) {
        lse${v}.s${e} = lse[(size_t)bh * T + own0 + 4 * y + ${32 * v + e}] * ${LOG2E};
        delta${v}.s${e} = delta[(size_t)bh * T + own0 + 4 * y + ${32 * v + e}];
    }
% endfor
% endfor
% for c, v in RESULT:
    float4 sum${c}_${v} = (float4)(0.0f);
% endfor
    const uint end = causal ? min(S, own0 + ROWS) : S;
    for (uint other0 = 0; other0 < end; other0 += ROWS) {
        ${tile_products("s", "q", "q_place.w", "T - own0", "k + k_place.w * other0", "k_place.w", "S - other0", "D")}
        ${tile_scores("i")}
        ${tile_products("g", "grad_out", "grad_out_place.w", "T - own0", "v + v_place.w * other0", "v_place.w", "S - other0",
                        "V")}
        ${tile_drop("g", "i")}
% for c, v in TILE:
        s${c}_${v} = exp2(s${c}_${v} - lse${v}) * (g${c}_${v} - delta${v});
% endfor
        ${publish("s")}
        ${tile_accumulate("sum", "k + k_place.w * other0", "k_place.w", "(S - other0)", "D")}
    }
% for c, v in RESULT:
    sum${c}_${v} *= scale;
% endfor
    ${write_result("sum", "grad_q", "grad_q_place", "T", "D")}
}
% else:
// Group (b * key heads * blocks + block, slice): of grad_k, of grad_v, or of both at once, as KERNEL says ("grad_key",
// "grad_value", "grad_key_value"; with both there is one slice). Query heads that share a key head are summed in order.
<%
KEY = KERNEL != "grad_value"
VALUE = KERNEL != "grad_key"
%>
__kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void attention_${KERNEL}(${backward_arguments()}
% if KEY:
                         __global ${stored(TYPE)} *grad_k, const ulong4 grad_k_place,
% endif
% if VALUE:
                         __global ${stored(TYPE)} *grad_v, const ulong4 grad_v_place,
% endif
                         const uint8 sizes, const float scale, const float scale2 ${dropout_arguments()}) {
    ${group_begin()}
    const uint blocks = (S + ROWS - 1) / ROWS;
    const uint heads = H / share;
    const uint bg = get_group_id(0) / blocks;
    const uint own0 = ROWS * (get_group_id(0) - bg * blocks);
    const uint b = bg / heads;
    const uint g = bg - b * heads;
    const uint c0 = get_group_id(1) * ${SLICE};
    k += place_of(k_place, b, g) + k_place.w * own0;
    v += place_of(v_place, b, g) + v_place.w * own0;
% if KEY:
    grad_k += place_of(grad_k_place, b, g);
% for c, v in RESULT:
    float4 key${c}_${v} = (float4)(0.0f);
% endfor
% endif
% if VALUE:
    grad_v += place_of(grad_v_place, b, g);
% for c, v in RESULT:
    float4 value${c}_${v} = (float4)(0.0f);
% endfor
% endif
    for (uint h = g * share; h < (g + 1) * share; h++) {
        const size_t bh = (size_t)b * H + h;
        const __global ${stored(TYPE)} *qh = q + place_of(q_place, b, h);
        const __global ${stored(TYPE)} *gh = grad_out + place_of(grad_out_place, b, h);
% if MASK:
        const size_t mask_at = place_of(mask_place, b, h);
% endif
        for (uint other0 = causal ? own0 : 0; other0 < T; other0 += ROWS) {
            ${tile_products("s", "k", "k_place.w", "S - own0", "qh + q_place.w * other0", "q_place.w", "T - other0", "D")}
            ${tile_scores("j")}
% for c in range(4):
            {
                const uint i = min(other0 + 4 * x + ${c}, T - 1);
                const float level = lse[bh * T + i] * ${LOG2E};
% for v in range(2):
                s${c}_${v} = exp2(s${c}_${v} - level);
% endfor
            }
% endfor
% if VALUE:
            {
% for c, v in TILE:
                float4 w${c}_${v} = s${c}_${v};
% endfor
                ${tile_drop("w", "j")}
                ${publish("w")}
                ${tile_accumulate("value", "gh + grad_out_place.w * other0", "grad_out_place.w", "(T - other0)", "V")}
            }
% endif
% if KEY:
            ${tile_products("d", "v", "v_place.w", "S - own0", "gh + grad_out_place.w * other0", "grad_out_place.w",
                            "T - other0", "V")}
            ${tile_drop("d", "j")}
% for c in range(4):
            {
                const float below = delta[bh * T + min(other0 + 4 * x + ${c}, T - 1)];
% for v in range(2):
                s${c}_${v} *= d${c}_${v} - below;
% endfor
            }
% endfor
            ${publish("s")}
            ${tile_accumulate("key", "qh + q_place.w * other0", "q_place.w", "(T - other0)", "D")}
% endif
        }
    }
% if KEY:
% for c, v in RESULT:
    key${c}_${v} *= scale;
% endfor
    ${write_result("key", "grad_k", "grad_k_place", "S", "D")}
% endif
% if VALUE:
    ${write_result("value", "grad_v", "grad_v_place", "S", "V")}
% endif
}
% endif
