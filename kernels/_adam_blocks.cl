// The step of kernels/adam.cl on codes of _moments.cl.
<%
def put(name, kind, stream, value, j, left, guess=False):
    places = {"signed": ", map", "unsigned": ", map + MAP_UNSIGNED"}[kind] if CODING == "dynamic" else ""
    uniform = f", {drawn(stream, j)}" if CHANCE else ""
    if guess:
        return f"put_whole({'exp_avg' if name == 'm' else 'exp_avg_sq'}, at + {j}, 8, guess_{kind}({value}, {name}_coder, {int(kind == 'unsigned')}, &close))"
    code = f"encode_{kind}({value}, {name}_coder, {int(kind == 'unsigned')}{places}{uniform})"
    codes = {"m": "exp_avg", "s": "exp_avg_sq"}[name]
    return f"put_whole({codes}, at + {j}, {left}, {code})"
%>
<%
ZERO_M = 127 if CODING == "dynamic" else 0
OF_MAP_S = OF_MAP and ", map + MAP_UNSIGNED"
%>
<%def name="updated(j, left)">
            ${weight_and_gradient(j, left)}
% if PTX:
            vec m = decode_signed(taken_word(exp_avg, at + ${j}, ${left}, ${ZERO_M})${OF_MAP}) * m_scale;
            vec s = decode_unsigned(taken_word(exp_avg_sq, at + ${j}, ${left}, 0)${OF_MAP_S}) * s_scale;
% else:
            vec m = decode_signed(exp_avg, at + ${j}, ${left}${OF_MAP}) * m_scale;
            vec s = decode_unsigned(exp_avg_sq, at + ${j}, ${left}${OF_MAP_S}) * s_scale;
% endif
            adam_update(g, &p, &m, &s, rule);
</%def>
<%def name="taken(j, left)">
            ${weight_and_gradient(j, left)}
            held_g[k] = g;
            held_p[k] = p;
            m_codes[k] = taken_word(exp_avg, at + ${j}, ${left}, ${ZERO_M});
            s_codes[k] = taken_word(exp_avg_sq, at + ${j}, ${left}, 0);
</%def>
<%def name="most_counted()">
            most_m = max(most_m, magnitudes(m));
            most_s = max(most_s, magnitudes(s));
</%def>
<%def name="put_codes_of(m, s, j, left)">
            ${put("m", "signed", STREAM_EXP_AVG, m, j, left)};
            ${put("s", "unsigned", STREAM_EXP_AVG_SQ, s, j, left)};
</%def>
<%def name="put_scales()">
            exp_avg_scale[within] = m_coder.scale;
            exp_avg_sq_scale[within] = s_coder.scale;
</%def>
% if CODING == "dynamic" and GPU:
    __local float map[2 * MAP_SIZE];
    for (uint i = get_local_id(0); i < 2 * MAP_SIZE; i += ${LANES * SLOTS}) map[i] = chart[i];
    barrier(CLK_LOCAL_MEM_FENCE);
% elif CODING == "dynamic":
    const __global float *map = chart;
% endif
% if GPU:
    __local uint2 scratch[${SLOTS * (LANES + MOST_STAGE)}];
    ${blocks_begin()}
        ${flags_known()}
        const float m_scale = count ? exp_avg_scale[within] : 0.0f;
        const float s_scale = count ? exp_avg_sq_scale[within] : 0.0f;
        uint4 most_m = (uint4)(0), most_s = (uint4)(0), most_g = (uint4)(0);
% if HELD:
        vec held_m[${HELD}], held_s[${HELD}]${f", held_p[{HELD}]" if PTX or SKIP == "block" else ""};
% if PTX:
        // All of a block is asked for, without conditions where it is whole, before any of it is awaited.
        vec held_g[${HELD}];
        uint m_codes[${HELD}], s_codes[${HELD}];
        if (count == ${4 * LANES * HELD}) {
            #pragma unroll
            for (uint k = 0; k < ${HELD}; k++) {
                ${taken("4 * (lane + k * %d)" % LANES, "4")}
            }
        } else {
            #pragma unroll
            for (uint k = 0; k < ${HELD}; k++) {
                const uint j = 4 * (lane + k * ${LANES});
                held_g[k] = held_p[k] = (vec)(0.0f);
                m_codes[k] = ${ZERO_M * 0x01010101};
                s_codes[k] = 0;
                if (j < count) {
                    ${taken("j", "count - j")}
                }
            }
        }
% if SKIP == "block":
        bool wrong = false;
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) {
% for i in "xyzw":
            wrong |= !(fabs(held_g[k].${i}) <= 0x1p63f);
% endfor
        }
        if (lanes_any(wrong, slot)) {
            if (lane == 0) {
                ${block_left_out()}
            }
            count = 0;
        }
% endif
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) {
            const uint j = 4 * (lane + k * ${LANES});
            vec p = held_p[k];
            vec m = decode_signed(m_codes[k]${OF_MAP}) * m_scale;
            vec s = decode_unsigned(s_codes[k]${OF_MAP_S}) * s_scale;
            adam_update(held_g[k], &p, &m, &s, rule);
            ${most_counted()}
            if (j < count) ${put_weight("p", "j", "count - j")};
            held_m[k] = m;
            held_s[k] = s;
        }
% else:
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) {
            const uint j = 4 * (lane + k * ${LANES});
            if (j < count) {
                ${updated("j", "count - j")}
                ${most_counted()}
                held_m[k] = m;
                held_s[k] = s;
% if SKIP == "block":
                most_g = max(most_g, magnitudes(g));
                held_p[k] = p;
% else:
                ${put_weight("p", "j", "count - j")};
% endif
            }
        }
% endif
% else:
        for (uint j = 4 * lane; j < count; j += ${4 * LANES}) {
            ${updated("j", "count - j")}
            ${most_counted()}
            most_g = max(most_g, magnitudes(g));
        }
% endif
        uint2 most = (uint2)(highest(most_m), highest(most_s));
% if SKIP == "block" and not (PTX and HELD):
        // What no number's bits are: the block is left out.
        if (highest(most_g) > GRADIENT_MAX) most = (uint2)(0xffffffffu);
        most = lanes_max(most, scratch + slot * ${LANES + MOST_STAGE}, lane);
        if (most.x == 0xffffffffu) {
            if (lane == 0) {
                ${block_left_out()}
            }
            count = 0;
        }
% else:
        most = lanes_max(most, scratch + slot * ${LANES + MOST_STAGE}, lane);
% endif
        const coder m_coder = coder_of(most.x), s_coder = coder_of(most.y);
        // All have read the scales${": what they made of them is in `most`" if PTX else ""}.
% if not PTX:
        barrier(CLK_GLOBAL_MEM_FENCE);
% endif
        if (lane == 0 && count) {
            ${put_scales()}
        }
% if HELD:
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) {
            const uint j = 4 * (lane + k * ${LANES});
            if (j < count) {
% if SKIP == "block" and not PTX:
                ${put_weight("held_p[k]", "j", "count - j")};
% endif
                ${put_codes_of("held_m[k]", "held_s[k]", "j", "count - j")}
            }
        }
% else:
        for (uint j = 4 * lane; j < count; j += ${4 * LANES}) {
            ${updated("j", "count - j")}
            ${put_weight("p", "j", "count - j")};
            ${put_codes_of("m", "s", "j", "count - j")}
        }
% endif
    }
% else:
<%
# Whole vectors, and what is left of the block's last one.
LOOPS = (("for (uint j = 0; j < count / 8 * 8; j += 8)", "8"), ("for (uint j = count / 8 * 8; j < count; j += 8)", "count - j"))
%>
% if HELD:
    __local float held_m[${HELD}], held_s[${HELD}];
% endif
    ${blocks_begin()}
        ${flags_known()}
        ${gradients_known()}
        const float m_scale = exp_avg_scale[within];
        const float s_scale = exp_avg_sq_scale[within];
        uint8 most_m = (uint8)(0), most_s = (uint8)(0);
% for each, left in LOOPS:
        ${each} {
            ${updated("j", left)}
            ${most_counted()}
% if HELD:
            ${put_weight("p", "j", left)};
            vstore8(m, 0, held_m + j);
            vstore8(s, 0, held_s + j);
% endif
        }
% endfor
        const coder m_coder = coder_of(highest(most_m)), s_coder = coder_of(highest(most_s));
        ${put_scales()}
% if HELD and not CHANCE:
        // Guessed first, and encoded where one of the guesses may be wrong.
        uint j = 0;
        while (j < count / 8 * 8) {
            const uint next = min(j + GUESSED, count / 8 * 8);
            int8 close = never_guess(m_coder) | never_guess(s_coder);
            for (uint i = j; i < next; i += 8) {
                ${put("m", "signed", 0, "vload8(0, held_m + i)", "i", "8", True)};
                ${put("s", "unsigned", 0, "vload8(0, held_s + i)", "i", "8", True)};
            }
            if (any(close)) {
                for (uint i = j; i < next; i += 8) {
                    ${put_codes_of("vload8(0, held_m + i)", "vload8(0, held_s + i)", "i", "8")}
                }
            }
            j = next;
        }
        if (j < count) {
            ${put_codes_of("vload8(0, held_m + j)", "vload8(0, held_s + j)", "j", "count - j")}
        }
% else:
% for each, left in LOOPS:
        ${each} {
% if HELD:
            ${put_codes_of("vload8(0, held_m + j)", "vload8(0, held_s + j)", "j", left)}
% else:
            ${updated("j", left)}
            ${put_weight("p", "j", left)};
            ${put_codes_of("m", "s", "j", left)}
% endif
        }
% endfor
% endif
    }
% endif
