<%doc>
What a step does to WIDTH elements, for kernels/adam.cl. A gradient counts unless its magnitude's bits are above GRADIENT_MAX.

adam_update(g, p, m, s, rule)    changes p, m and s (v where CODING is "dense") by the gradient g
note_skipped(skipped, step)      a tensor's step is left out, or a block of it
</%doc>
typedef struct {
    float sign, decay, beta1, rest1, beta2, rest2, step_size, root2, eps, bound${", inverse2, inverse2_rest, least" if PTX else ""};
} adam_rule;

<% PART = "quick_part(root, (vec)(rule.root2, rule.inverse2, rule.inverse2_rest, 0.0f))" %>
inline void adam_update(vec g, vec *p, vec *m, vec *s, adam_rule rule) {
% if DECAY == "added":
    g = g * rule.sign + rule.decay * *p;
    g = select((vec)(0.0f), g, magnitudes(g) <= GRADIENT_MAX);
% elif DECAY == "shrink":
    *p = *p * rule.decay;
% endif
    *m = rule.beta1 * *m + ${"rule.rest1" if DECAY == "added" else "(rule.rest1 * rule.sign)"} * g;
    const vec v = rule.beta2 * ${"*s" if CODING == "dense" else "(*s * *s)"} + rule.rest2 * (g * g);
    const vec step = rule.step_size * *m;
    ${root_and_quotient("v", "step", "root / rule.root2 + rule.eps", f"{PART} + rule.eps", "rule.least")}
% if CODING == "dense":
    *p = *p - q;
    *s = v;
% else:
    *p = *p - clamp(q, -rule.bound, rule.bound);
    *s = root;
% endif
}

#include "_written.cl"

inline void note_skipped(volatile __global int *skipped, int step) {
    skipped[0]++;
    skipped[1] = step;
}

// The seed of a stream in a step, from the step's own, as it enters a hash.
inline uint mixed_seed(uint seed, uint stream) {
    const uint own = hash_u32_1(seed + stream * 0x9e3779b9u);
    return own ^ own >> 16;
}
<%
STREAM_WEIGHT, STREAM_EXP_AVG, STREAM_EXP_AVG_SQ = 7, 8, 9

def drawn(stream, j):
    return f"uniform_of_{WIDTH}(heads_at(at + {j}), mixed_seed(seed, {stream}))"

def put_weight(p, j, left):
    value = p if PARAM == "float32" else f"written({p}, {drawn(STREAM_WEIGHT, j)})"
    return f"store_left_{PARAM}(param + at + {j}, {left}, {value})"
%>
<%def name="flags_known()">
% if SKIP == "tensor":
        // One item a tensor tells; all leave it out.
        const bool left_out = ${"count && " if GPU else ""}flags[first + which];
        if (left_out && within == 0${" && lane == 0" if GPU else ""}) note_skipped(skipped, step);
% if GPU:
        if (left_out) count = 0;
% else:
        if (left_out) continue;
% endif
% endif
</%def>
<%def name="weight_and_gradient(j, left)">
            vec p = load_left_${PARAM}(param + at + ${j}, ${left}, 0.0f);
            const vec g = load_left_${GRAD}(grad + at + ${j}, ${left}, 0.0f);
</%def>
<%def name="block_left_out()">
            if (atomic_or(flags + first + which, 1) == 0) note_skipped(skipped, step);
</%def>
<%def name="gradients_known()">
% if SKIP == "block":
        // CPUs look ahead: the block then comes from their caches.
        uint8 most_g = (uint8)(0);
        for (uint j = 0; j < count; j += 8) most_g = max(most_g, magnitudes(load_left_${GRAD}(grad + at + j, count - j, 0.0f)));
        if (highest(most_g) > GRADIENT_MAX) {
            ${block_left_out()}
            continue;
        }
% endif
</%def>
