<%doc>
What a reduction keeps of elements: Acc, and nothing(acc), absorb(acc, x, index, power), merge(a, b), finish(acc, ...), by OP;
beside them the same of eight columns, Acc_8 ..., for the CPU shape. (By pointer: structures as results make intrinsics that
Oclgrind does not know.) Expects OP, IN, OUT, FIELDS, GPU as kernels/reduce.cl.
</%doc>
<%
X = compute(IN)
T = result_type(OP, X, compute(OUT))
I = "ulong" if T == "long" else "uint"
MASK = "long" if X == "long" else "int"
SECOND_TYPE = "int64" if OP in ("max", "min") else OUT
HAS_SECOND = OP in ("max", "min", "aminmax", "var_mean", "std_mean")
SECOND = f"__global {stored(SECOND_TYPE)} *second, const ulong second0, " if HAS_SECOND else ""
EXTREMES = {"long": ("LONG_MIN", "LONG_MAX"), "int": ("INT_MIN", "INT_MAX"), "float": ("-INFINITY", "INFINITY")}
LEAST, GREATEST = EXTREMES[T]
POSITIONS = OP in ("argmax", "argmin", "max", "min")
MOMENTS = OP in ("var", "std", "var_mean", "std_mean")
MEMBERS = [(T, "value")]
if POSITIONS:
    MEMBERS += [(I, "index")]
elif MOMENTS:
    MEMBERS = [(T, "n"), (T, "mean"), (T, "m2")]
elif OP == "aminmax":
    MEMBERS += [(T, "most")]
elif OP == "logsumexp":
    MEMBERS += [(T, "scaled")]
LARGER = OP in ("amax", "argmax", "max", "normmax")
%>
<%!
SUMS = ("sum", "prod", "nansum")
EXTREME = ("amax", "amin", "aminmax", "argmax", "argmin", "max", "min")

def result_type(op, x, out):
    return out if op in SUMS else x if op in EXTREME else "long" if op == "count" else "int" if op in ("any", "all") else "float"

def wide(t, w):
    return t if w == 1 else f"{t}{w}"

def convert(to, value, w):
    return f"({to})({value})" if w == 1 else f"convert_{to}{w}({value})"

# `b` where the condition holds, else `a`: select of scalars wants its types cast, so scalars take the operator.
def choose(a, b, condition, w):
    return f"(({condition}) ? ({b}) : ({a}))" if w == 1 else f"select({a}, {b}, {condition})"

# 1 where x is not 0, else 0: a true comparison of vectors is -1.
def nonzero(x, to, w):
    return f"({to})({x} != 0)" if w == 1 else f"-convert_{to}{w}({x} != 0)"

# Whether x takes the place of y: it is further out, or the first NaN.
def beats(x, y, larger):
    return f"({x} {'>' if larger else '<'} {y}) | (({x} != {x}) & ({y} == {y}))"

def load_8(t, p, i):
    if t == "float16":
        return f"half_load_8({p} + ({i}))"
    loaded = f"vload8(0, {p} + ({i}))"
    if t == "bfloat16":
        return f"as_float8(convert_uint8({loaded}) << 16)"
    return loaded if t in ("float32", "int64", "int32") else f"convert_int8({loaded})"
%>
#include "_types.cl"
% if IN == "float16" and not GPU:

// Through memory of this work-item: PoCL 3.1 faults where vload_half8 meets an address that is no multiple of 16.
inline float8 half_load_8(const __global half *p) {
    const ushort8 bits = vload8(0, (const __global ushort *)p);
    return vload_half8(0, (const half *)&bits);
}
% endif

// ---- what is kept of elements, one at a time or eight columns wide ----
% for w in (1,) if GPU else (1, 8):
<% s = "" if w == 1 else "_8" %>
typedef struct {
% for kind, name in MEMBERS:
    ${wide(kind, w)} ${name};
% endfor
} Acc${s};

inline void nothing${s}(Acc${s} *acc) {
% if MOMENTS:
    acc->n = (${wide(T, w)})(0);
    acc->mean = (${wide(T, w)})(0);
    acc->m2 = (${wide(T, w)})(0);
% elif OP == "logsumexp":
    acc->value = (${wide(T, w)})(-INFINITY);
    acc->scaled = (${wide(T, w)})(0);
% elif OP == "aminmax":
    acc->value = (${wide(T, w)})(${GREATEST});
    acc->most = (${wide(T, w)})(${LEAST});
% elif LARGER or OP in ("amin", "argmin", "min", "normmin"):
    acc->value = (${wide(T, w)})(${LEAST if LARGER else GREATEST});
% else:
    acc->value = (${wide(T, w)})(${1 if OP in ("prod", "all") else 0});
% endif
% if POSITIONS:
    // Nothing beats the start where every element equals it, and the first place is then right.
    acc->index = (${wide(I, w)})(0);
% endif
}

inline void absorb${s}(Acc${s} *acc, const ${wide(X, w)} x, const ${wide(I, w)} index, const float power) {
% if OP == "sum":
    acc->value += ${convert(T, "x", w)};
% elif OP == "nansum":
    acc->value += ${choose(convert(T, "x", w), f"({wide(T, w)})(0)", "x != x", w)};
% elif OP == "prod":
    acc->value *= ${convert(T, "x", w)};
% elif OP in ("amax", "amin"):
    acc->value = ${choose("acc->value", "x", beats("x", "acc->value", LARGER), w)};
% elif OP == "aminmax":
    acc->value = ${choose("acc->value", "x", beats("x", "acc->value", False), w)};
    acc->most = ${choose("acc->most", "x", beats("x", "acc->most", True), w)};
% elif POSITIONS:
    const ${wide(MASK, w)} better = ${beats("x", "acc->value", LARGER)};
    acc->value = ${choose("acc->value", "x", "better", w)};
    acc->index = ${choose("acc->index", "index", "better", w)};
% elif OP == "any":
    acc->value |= ${nonzero("x", T, w)};
% elif OP == "all":
    acc->value &= ${nonzero("x", T, w)};
% elif OP == "count":
    acc->value += ${nonzero("x", T, w)};
% elif OP == "norm0":
    acc->value += ${nonzero("x", T, w)};
% elif OP == "norm1":
    acc->value += fabs(x);
% elif OP == "norm2":
    acc->value += x * x;
% elif OP == "normp":
    acc->value += pow(fabs(x), (${wide(T, w)})(power));
% elif OP in ("normmax", "normmin"):
    const ${wide(X, w)} size = fabs(x);
    acc->value = ${choose("acc->value", "size", beats("size", "acc->value", LARGER), w)};
% elif MOMENTS:
    // Welford's: no difference of large sums.
    const ${wide(X, w)} far = x - acc->mean;
    acc->n += 1.0f;
    acc->mean += far / acc->n;
    acc->m2 += far * (x - acc->mean);
% elif OP == "logsumexp":
    // scaled = sum exp(x - value); equal infinities count as a difference of 0.
    const ${wide(X, w)} top = ${choose("acc->value", "x", "x > acc->value", w)};
    acc->scaled = acc->scaled * ${choose("exp(acc->value - top)", f"({wide(X, w)})(1.0f)", "acc->value == top", w)}
        + ${choose("exp(x - top)", f"({wide(X, w)})(1.0f)", "x == top", w)};
    acc->value = top;
% endif
}

// b into a, which stands for elements before b's.
inline void merge${s}(Acc${s} *a, const Acc${s} *b) {
% if OP == "prod":
    a->value *= b->value;
% elif OP in ("amax", "amin", "normmax", "normmin"):
    a->value = ${choose("a->value", "b->value", beats("b->value", "a->value", LARGER), w)};
% elif OP == "aminmax":
    a->value = ${choose("a->value", "b->value", beats("b->value", "a->value", False), w)};
    a->most = ${choose("a->most", "b->most", beats("b->most", "a->most", True), w)};
% elif POSITIONS:
    const ${wide(MASK, w)} equal = (a->value == b->value) | ((a->value != a->value) & (b->value != b->value));
    const ${wide(MASK, w)} better = (${beats("b->value", "a->value", LARGER)}) | (equal & (b->index < a->index));
    a->value = ${choose("a->value", "b->value", "better", w)};
    a->index = ${choose("a->index", "b->index", "better", w)};
% elif OP == "any":
    a->value |= b->value;
% elif OP == "all":
    a->value &= b->value;
% elif MOMENTS:
    const ${wide(T, w)} n = a->n + b->n;
    const ${wide(T, w)} share = b->n / fmax(n, (${wide(T, w)})(1.0f));
    const ${wide(T, w)} apart = b->mean - a->mean;
    a->mean += apart * share;
    a->m2 += b->m2 + apart * apart * a->n * share;
    a->n = n;
% elif OP == "logsumexp":
    const ${wide(T, w)} top = ${choose("a->value", "b->value", "b->value > a->value", w)};
    a->scaled = a->scaled * ${choose("exp(a->value - top)", f"({wide(T, w)})(1.0f)", "a->value == top", w)}
        + b->scaled * ${choose("exp(b->value - top)", f"({wide(T, w)})(1.0f)", "b->value == top", w)};
    a->value = top;
% else:
    a->value += b->value;
% endif
}
% endfor

// The launcher allots FIELDS numbers to an Acc.
typedef char acc_has_its_size[sizeof(Acc) == ${FIELDS} * sizeof(${T}) ? 1 : -1];

inline void finish(const Acc *acc, __global ${stored(OUT)} *out, const ulong at, ${SECOND}const float divisor, const float power) {
% if OP in ("argmax", "argmin"):
    ${store(OUT, "out", "at", "(long)acc->index")};
% elif MOMENTS:
    const float variance = acc->m2 / divisor;
    ${store(OUT, "out", "at", "variance" if OP.startswith("var") else "sqrt(variance)")};
    % if HAS_SECOND:
    ${store(OUT, "second", "second0", "acc->n > 0.0f ? acc->mean : NAN")};
    % endif
% elif OP == "logsumexp":
    ${store(OUT, "out", "at", "acc->value + log(acc->scaled)")};
% elif OP == "norm2":
    ${store(OUT, "out", "at", "sqrt(acc->value)")};
% elif OP == "normp":
    ${store(OUT, "out", "at", "pow(acc->value, 1.0f / power)")};
% elif OP in ("sum", "nansum") and T == "float":
    ${store(OUT, "out", "at", "acc->value / divisor")};
% else:
    ${store(OUT, "out", "at", "acc->value")};
% endif
% if POSITIONS and HAS_SECOND:
    ${store(SECOND_TYPE, "second", "second0", "(long)acc->index")};
% elif OP == "aminmax":
    ${store(OUT, "second", "second0", "acc->most")};
% endif
}
