<%doc>
What a step does to WIDTH elements, and how weights of 16 bits are written, for kernels/adam.cl. A gradient counts unless its magnitude's bits are
above GRADIENT_MAX.

adam_update(g, p, m, s, rule)    changes p, m and s (v where CODING is "dense") by the gradient g
written(p, ...)                  p as a number of PARAM, stochastically where it has 16 bits; `...` are uniform numbers there
note_skipped(skipped, step)      a tensor's step is left out, or a block of it
</%doc>
typedef struct {
    float sign, decay, beta1, rest1, beta2, rest2, step_size, root2, eps, bound;
} adam_rule;

inline void adam_update(vec g, vec *p, vec *m, vec *s, adam_rule rule) {
    g = g * rule.sign;
% if DECAY == "added":
    g = g + rule.decay * *p;
    g = select((vec)(0.0f), g, magnitudes(g) <= GRADIENT_MAX);
% elif DECAY == "shrink":
    *p = *p * rule.decay;
% endif
    *m = rule.beta1 * *m + rule.rest1 * g;
    const vec v = rule.beta2 * ${"*s" if CODING == "dense" else "(*s * *s)"} + rule.rest2 * (g * g);
    const vec root = sqrt(v);
    const vec q = (rule.step_size * *m) / (root / rule.root2 + rule.eps);
% if CODING == "dense":
    *p = *p - q;
    *s = v;
% else:
    *p = *p - clamp(q, -rule.bound, rule.bound);
    *s = root;
% endif
}

% if PARAM == "bfloat16":
// Of the magnitude's bits the lower half is what lies between two numbers of the type.
inline vec written(vec p, vec u) {
    const uint${WIDTH} magnitude = magnitudes(p);
    const vec between = convert_float${WIDTH}(as_int${WIDTH}(magnitude & 0xffffu)) * 1.52587890625e-5f;
    const uint${WIDTH} up = as_uint${WIDTH}(u < between) & 0x10000u;
    const uint${WIDTH} rounded = min((magnitude & 0xffff0000u) + up, 0x7f7f0000u);
    const uint${WIDTH} kept = select(magnitude, rounded, magnitude < LEAST_INFINITE);
    return as_float${WIDTH}(kept | (as_uint${WIDTH}(p) & 0x80000000u));
}
% elif PARAM == "float16":
// Below 2^-14 numbers of the type lie 2^-24 apart; above, as many in each power of two.
inline vec written(vec p, vec u) {
    const uint${WIDTH} magnitude = magnitudes(p);
    const vec between = convert_float${WIDTH}(as_int${WIDTH}(magnitude & 0x1fffu)) * 1.220703125e-4f;
    const uint${WIDTH} up = as_uint${WIDTH}(u < between) & 0x2000u;
    const uint${WIDTH} normal = min((magnitude & 0xffffe000u) + up, 0x477fe000u);
    const vec small = as_float${WIDTH}(magnitude) * 16777216.0f;
    const vec below = floor(small);
    const vec rounded = select(below, below + 1.0f, u < small - below) * 5.9604644775390625e-8f;
    const uint${WIDTH} finite = select(as_uint${WIDTH}(rounded), normal, magnitude >= 0x38800000u);
    const uint${WIDTH} kept = select(magnitude, finite, magnitude < LEAST_INFINITE);
    return as_float${WIDTH}(kept | (as_uint${WIDTH}(p) & 0x80000000u));
}
% endif

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
