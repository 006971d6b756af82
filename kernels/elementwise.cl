// Elementwise: OUTPUTS = BODY(INPUTS), any number of each, strided and broadcast. One element (on GPUs four, a group's width apart)
// belongs to one work-item. Launched by memtrain_cl/ops/elementwise.py.
//
//   INPUTS, OUTPUTS  element types.   CASTS  the C type in which BODY sees each input, x0, x1 ...
//   SCALARS          the C types of the scalars s0, s1 ...   BODY  statements that set y0, y1 ..., of the C types RESULTS
//   RANK 0           all operands are contiguous or one element: MODES says "u" (a unit step) or "z" (none) for each, outputs first
//   RANK r           rows: r outer dimensions with run-time strides, and an inner one whose steps MODES gives ("g": at run time)
//   GPU              one flat range of work-groups, or (columns, rows) for compilers that vectorise the first dimension.
//
// Not covered: element counts beyond 2^31 in one launch; the launcher splits those.
#include "_types.cl"
#include "_math.cl"
<%
NAMES = [f"y{k}" for k in range(len(OUTPUTS))] + [f"x{k}" for k in range(len(INPUTS))]
TYPES = [*OUTPUTS, *INPUTS]
def place(k, index):
    mode = MODES[k]
    step = {"u": index, "z": "0", "g": f"(long){index} * {NAMES[k]}_step"}[mode]
    return step if RANK == 0 else f"({NAMES[k]}_row + {step})"
%>
inline void element(
% for k, (name, t) in enumerate(zip(NAMES, TYPES)):
    ${"" if k < len(OUTPUTS) else "const "}__global ${stored(t)} *${name}_base,
% if RANK and MODES[k] == "g":
    const long ${name}_step,
% endif
% if RANK:
    const long ${name}_row,
% endif
% endfor
% for k, c in enumerate(SCALARS):
    const ${c} s${k},
% endfor
    const uint i) {
% for k, t in enumerate(INPUTS):
    const ${CASTS[k]} x${k} = (${CASTS[k]})${load(t, f"x{k}_base", place(len(OUTPUTS) + k, "i"))};
% endfor
% for k, c in enumerate(RESULTS):
    ${c} y${k};
% endfor
    ${BODY}
% for k, t in enumerate(OUTPUTS):
    ${store(t, f"y{k}_base", place(k, "i"), f"({compute(t)})y{k}")};
% endfor
}

__kernel void elementwise(
% for k, (name, t) in enumerate(zip(NAMES, TYPES)):
    ${"" if k < len(OUTPUTS) else "const "}__global ${stored(t)} *${name}_data, const ulong ${name}_first,
% endfor
% for k, c in enumerate(SCALARS):
    const ${c} s${k},
% endfor
% for d in range(RANK):
    const uint size${d},
% endfor
% for k, name in enumerate(NAMES):
% for d in range(RANK):
    const long ${name}_stride${d},
% endfor
% if RANK and MODES[k] == "g":
    const long ${name}_step,
% endif
% endfor
    const uint n, const uint rows, const uint tiles, const uint shift) {
% for name in NAMES:
    ${f"const __global {stored(dict(zip(NAMES, TYPES))[name])}" if name[0] == "x" else f"__global {stored(dict(zip(NAMES, TYPES))[name])}"} *${name}_base = ${name}_data + ${name}_first;
% endfor
% if RANK == 0:
    const uint first = get_group_id(0) * (${PER} * (uint)get_local_size(0)) + (uint)get_local_id(0);
    #pragma unroll
    for (uint e = 0; e < ${PER}; e++) {
        const uint i = first + e * (uint)get_local_size(0);
        if (i < n) element(${", ".join([f"{name}_base" for name in NAMES] + [f"s{k}" for k in range(len(SCALARS))])}, i);
    }
% else:
% if GPU:
    // A group covers 2^shift columns and as many rows as it has items left for.
    const uint block = get_group_id(0) / tiles;
    const uint tile = get_group_id(0) - block * tiles;
    const uint i = (tile << shift) + ((uint)get_local_id(0) & ((1u << shift) - 1));
    const uint row = block * ((uint)get_local_size(0) >> shift) + ((uint)get_local_id(0) >> shift);
% else:
    const uint i = get_global_id(0);
    const uint row = get_global_id(1);
% endif
    if (i >= n || row >= rows) return;
    uint rest = row;
% for d in reversed(range(RANK)):
% if d:
    const uint next${d} = rest / size${d};
    const uint at${d} = rest - next${d} * size${d};
    rest = next${d};
% else:
    const uint at0 = rest;
% endif
% endfor
% for name in NAMES:
    const long ${name}_row = ${" + ".join(f"at{d} * {name}_stride{d}" for d in range(RANK))};
% endfor
    element(${", ".join(sum(([f"{name}_base"] + ([f"{name}_step"] if MODES[k] == "g" else []) + [f"{name}_row"] for k, name in enumerate(NAMES)), []) + [f"s{k}" for k in range(len(SCALARS))])}, i);
% endif
}
