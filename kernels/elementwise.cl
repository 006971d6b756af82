// Elementwise: OUTPUTS = BODY(INPUTS), any number of each, strided and broadcast. Launched by memtrain_cl/launchers/elementwise.py.
//
//   INPUTS, OUTPUTS  element types.   CASTS  the C type in which BODY sees each input, x0, x1 ...
//   SCALARS          the C types of the scalars s0, s1 ...   BODY  statements that set y0, y1 ..., of the C types RESULTS;
//                    i is the element's place in the inner dimension
//   RANK 0           one dimension: MODES says "u" (a unit step) or "z" (none) for each operand, outputs first
//   RANK r           rows: r outer dimensions with run-time strides, and an inner one whose steps MODES gives ("g": at run time)
//   GPU              one flat range of work-groups, or (columns, rows) for compilers that vectorise the first dimension
//   VEC              neighbouring elements of a work-item: 4 where every operand is so aligned and sized, else 1
//   UNITS            in one dimension: how many times VEC elements a work-item has, a group's width apart.
#include "_types.cl"
#include "_math.cl"
<%
NAMES = [f"y{k}" for k in range(len(OUTPUTS))] + [f"x{k}" for k in range(len(INPUTS))]
TYPES = [*OUTPUTS, *INPUTS]
LANES = "xyzw"

def place(k):
    step = {"u": "first", "z": "0", "g": f"(long)first * {NAMES[k]}_step"}[MODES[k]]
    return step if RANK == 0 else f"({NAMES[k]}_row + {step})"

def const(k):
    return "" if k < len(OUTPUTS) else "const "
%>
<%def name="lane(e)">
    {
        const uint i = first + ${e};
% for k, t in enumerate(INPUTS):
<%  position = len(OUTPUTS) + k %>
% if VEC == 1 or MODES[position] == "z":
        const ${CASTS[k]} x${k} = (${CASTS[k]})${load(t, f"x{k}_base", place(position))};
% else:
        const ${CASTS[k]} x${k} = (${CASTS[k]})x${k}_lanes.${LANES[e]};
% endif
% endfor
% for k, c in enumerate(RESULTS):
        ${c} y${k};
% endfor
        ${BODY}
% for k, t in enumerate(OUTPUTS):
% if VEC == 1:
        ${store(t, f"y{k}_base", place(k), f"({compute(t)})y{k}")};
% else:
        y${k}_lanes.${LANES[e]} = (${compute(t)})y${k};
% endif
% endfor
    }
</%def>
inline void element(
% for k, (name, t) in enumerate(zip(NAMES, TYPES)):
    ${const(k)}__global ${stored(t)} *${name}_base,
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
    const uint first) {
% if VEC == 4:
% for k, t in enumerate(INPUTS):
% if MODES[len(OUTPUTS) + k] == "u":
    const ${compute(t)}4 x${k}_lanes = ${load_4(t, f"x{k}_base", place(len(OUTPUTS) + k))};
% endif
% endfor
% for k, t in enumerate(OUTPUTS):
    ${compute(t)}4 y${k}_lanes;
% endfor
% endif
% for e in range(VEC):
${lane(e)}
% endfor
% if VEC == 4:
% for k, t in enumerate(OUTPUTS):
    ${store_4(t, f"y{k}_base", place(k), f"y{k}_lanes")};
% endfor
% endif
}

__kernel void elementwise(
% for k, (name, t) in enumerate(zip(NAMES, TYPES)):
    ${const(k)}__global ${stored(t)} *${name}_data, const ulong ${name}_first,
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
% for k, (name, t) in enumerate(zip(NAMES, TYPES)):
    ${const(k)}__global ${stored(t)} *${name}_base = ${name}_data + ${name}_first;
% endfor
% if RANK == 0:
    const uint unit = get_group_id(0) * (${UNITS} * (uint)get_local_size(0)) + (uint)get_local_id(0);
    #pragma unroll
    for (uint e = 0; e < ${UNITS}; e++) {
        const uint i = ${VEC} * (unit + e * (uint)get_local_size(0));
        if (i < n) element(${", ".join([f"{name}_base" for name in NAMES] + [f"s{k}" for k in range(len(SCALARS))])}, i);
    }
% else:
% if GPU:
    // A group covers 2^shift units of VEC columns and as many rows as it has items left for.
    const uint block = get_group_id(0) / tiles;
    const uint tile = get_group_id(0) - block * tiles;
    const uint i = ${VEC} * ((tile << shift) + ((uint)get_local_id(0) & ((1u << shift) - 1)));
    const uint row = block * ((uint)get_local_size(0) >> shift) + ((uint)get_local_id(0) >> shift);
% else:
    const uint i = ${VEC} * get_global_id(0);
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
