// The counter automaton on one element or one vector of elements, in exact small-integer float32 arithmetic.
// Needs: C, VECTOR_WIDTHS, _rng.cl, _counter_state.cl. The caller's file says FP_CONTRACT OFF.
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
    float${S} val = c * r - g * k;
    val = clamp(val, ${-4.0 * C}f, ${4.0 * C}f);

    // cc = floor(val) + (u < val - floor(val)), with floor made from the nearest integer.
    const float${S} nearest = (val + ROUND_MAGIC) - ROUND_MAGIC;
    const float${S} rest = val - nearest;
    const float${S} below = (rest < 0.0f) ? nearest - 1.0f : nearest;
    const float${S} fraction = (rest < 0.0f) ? rest + 1.0f : rest;
    const float${S} cc = (uniform01_${W}(random) < fraction) ? below + 1.0f : below;

    // carry = trunc(cc/C), t' = clamp(t + carry), the pressure kept at a blocked wall: all of it is the position
    // m = |cc| + sign(cc)*t*C on a line of 3C quanta, cut at 2C-1; each of the two borders it passes costs C-1 codes more.
    const float${S} towards = (cc < 0.0f) ? -t : t;
    const float${S} m = fmin(fabs(cc) + towards * ${C}.0f, (float${S})(${2.0 * C - 1}f));
    const float${S} first = (m >= 0.0f) ? (float${S})(1.0f) : (float${S})(0.0f);
    const float${S} second = (m >= ${C}.0f) ? (float${S})(1.0f) : (float${S})(0.0f);
    const float${S} borders = first + second;
    const float${S} shifted = m + (borders - 1.0f) * ${C - 1}.0f;
    const float${S} out = (cc < 0.0f) ? ${CENTER}.0f - shifted : ${CENTER}.0f + shifted;

    *events += (cc != c) ? (uint${S})(1) : (uint${S})(0);
    *flips += (borders - 1.0f != towards) ? (uint${S})(1) : (uint${S})(0);
    return as_uint${S}(convert_int${S}(out));
}
% endfor
