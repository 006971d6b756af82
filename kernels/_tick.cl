// The counter automaton on one element or one vector of elements, in exact small-integer float32 arithmetic.
// Needs: C, GPU, VECTOR_WIDTHS, _rng.cl, _counter_state.cl. The caller's file says FP_CONTRACT OFF.
<%
LEVELS = 2 * C - 1
CENTER = LEVELS + C - 1
%>
% for W in VECTOR_WIDTHS:
<% S = "" if W == 1 else str(W) %>
// One tick: code -> new code. k = (lr/denom)*(C/s_new), r = s_old/s_new, u = the rounding's uniform number.
// Adds to *events where the counter moved and to *flips where the ternary weight changed.
inline uint${S} tick_${W}(uint${S} code, float${S} g, float k, float r, uint${S} random, uint${S} *events, uint${S} *flips) {
    const float${S} centred = convert_float${S}(as_int${S}(code)) - ${CENTER}.0f;
    const float${S} t = code_ternary_${W}(centred);
    const float${S} c = centred - t * ${LEVELS}.0f;

    // cc = floor(val) + (u < val - floor(val)).
% if GPU:
    // GPUs floor at a fraction of their rate: the nearest integer, lowered where it lies above, costs less.
    const float${S} val = clamp(c * r - g * k, ${-4.0 * C}f, ${4.0 * C}f);
    const float${S} nearest = (val + ROUND_MAGIC) - ROUND_MAGIC;
    const float${S} rest = val - nearest;
    const float${S} below = (rest < 0.0f) ? nearest - 1.0f : nearest;
    const float${S} fraction = (rest < 0.0f) ? rest + 1.0f : rest;
% else:
    // No clamp to +-4C is needed here, nothing is converted before the position below is cut at the walls.
    const float${S} val = c * r - g * k;
    const float${S} below = floor(val);
    const float${S} fraction = val - below;
% endif
    const float${S} cc = (uniform01_${W}(random) < fraction) ? below + 1.0f : below;

    // carry = trunc(cc/C), t' = clamp(t + carry), rest = cc - carry*C, the pressure kept at a blocked wall: all of it is the
    // position p = t*C + cc, cut at the walls +-(2C-1). A weight that comes from below turns 1 at p = C and is -1 up to p = -1;
    // one that comes from above turns -1 at p = -C and is 1 down to p = 1. The code is then t'*(2C-1) + (p - t'*C).
    const float${S} p = clamp(t * ${C}.0f + cc, ${1.0 - 2 * C}f, ${2.0 * C - 1}f);
    const float${S} upper = (cc < 0.0f) ? (float${S})(1.0f) : (float${S})(${C}.0f);
    const float${S} plus = (p >= upper) ? (float${S})(1.0f) : (float${S})(0.0f);
    const float${S} minus = (p <= upper - ${C + 1}.0f) ? (float${S})(1.0f) : (float${S})(0.0f);
    const float${S} turned = plus - minus;
    const float${S} out = (p + ${CENTER}.0f) + turned * ${C - 1}.0f;

    *events += (cc != c) ? (uint${S})(1) : (uint${S})(0);
    *flips += (turned != t) ? (uint${S})(1) : (uint${S})(0);
    return as_uint${S}(convert_int${S}(out));
}
% endfor
