// The counter automaton on one element or one vector of elements, in exact small-integer float32 arithmetic.
// Needs: C, GPU, VECTOR_WIDTHS, LAZY, TERNARY, _rng.cl, _counter_state.cl. The caller's file says FP_CONTRACT OFF.
<%
LEVELS = 2 * C - 1
%>
<%doc>
Counting costs a compare and an add on CPUs. GPUs run compares on the pipe that the hash already fills, so there the square of an
integer difference, cut at one, is added on the other. select() and not ?:, of which Oclgrind makes 255 where a lane of a vector is true.
</%doc>
<%def name="count(total, difference, kind)">
% if GPU:
    ${total} += clamp((${difference}) * (${difference}), 0.0f, 1.0f);
% else:
    ${total} += select((uint${kind})(0), (uint${kind})(1), ${difference} != 0.0f);
% endif
</%def>

% for W in VECTOR_WIDTHS:
<%
S = "" if W == 1 else str(W)
COUNT = "float" if GPU else "uint"
%>
% if TERNARY:
// The unbiased ternary estimate of a gradient whose row's largest magnitude is `peak`: +-peak with probability |g|/peak, else 0.
// A row of zeros stays one: 0/0 is no number, which no u is below.
inline float${S} pulse_${W}(float${S} g, float peak, uint${S} head, uint pulse_mixed) {
    const float${S} share = fabs(g) / peak;
    return (uniform_of_${W}(head, pulse_mixed) < share) ? copysign((float${S})(peak), g) : (float${S})(0.0f);
}

% endif
// One tick: the code's value centred = t*(2C-1) + c -> the new one. k = (lr/denom)*(C/s_new), r = s_old/s_new; head and mixed give
// the rounding's u. Adds to *events where the counter moved and to *flips where the ternary weight changed.
% if LAZY:
// r = s_base/s_old and k = (lr/denom)*(C/s_old) here: the counter itself is rounded in units of the scale first, by rebase_mixed.
% endif
inline float${S} tick_${W}(float${S} centred, float${S} g, float k, float r, uint${S} head, uint mixed, ${"uint rebase_mixed, " if LAZY else ""}${COUNT}${S} *events,
                    ${COUNT}${S} *flips) {
    const float${S} t = code_ternary_${W}(centred);
    const float${S} c = EXACT_MAD(t, (float${S})(${-LEVELS}.0f), centred);

    // cc = floor(val) + (u < val - floor(val)). No clamp to +-4C is needed: the position below is cut at the walls.
% if LAZY:
    const float${S} wanted = c * r;
    const float${S} under = floor(wanted);
    const float${S} rebased = (uniform_of_${W}(head, rebase_mixed) < wanted - under) ? under + 1.0f : under;
    const float${S} val = rebased - g * k;
% else:
    const float${S} val = c * r - g * k;
% endif
    const float${S} below = floor(val);
    const float${S} cc = (uniform_of_${W}(head, mixed) < val - below) ? below + 1.0f : below;

    // carry = trunc(cc/C), t' = clamp(t + carry), rest = cc - carry*C, the pressure kept at a blocked wall: all of it is the
    // position p = t*C + cc, cut at the walls +-(2C-1). A weight that comes from below is floor(p/C), one that comes from
    // above ceil(p/C): p/C moved by half less half a quantum against the sign of cc, then rounded. The code is t'*(2C-1) + (p - t'*C).
    const float${S} p = clamp(EXACT_MAD(t, (float${S})(${C}.0f), cc), ${1.0 - 2 * C}f, ${2.0 * C - 1}f);
    const float${S} against = as_float${S}((as_uint${S}(cc) & 0x80000000u) ^ as_uint(${repr(0.5 / C - 0.5)}f));
    const float${S} turned = (EXACT_MAD(p, (float${S})(${repr(1.0 / C)}f), against) + ROUND_MAGIC) - ROUND_MAGIC;

    const float${S} moved = cc - c;
    const float${S} changed = turned - t;
    ${count("*events", "moved", S)}
    ${count("*flips", "changed", S)}
    return EXACT_MAD(turned, (float${S})(${C - 1}.0f), p);
}
% endfor
