<%doc>
Element types by torch's names. float16 and bfloat16 are stored in 16 bits and computed in float32; bool is a byte of 0 or 1.

stored(t)        the C type of an element in memory; float16 is a pointer's type alone (loads and stores go through built-ins)
compute(t)       the C type that arithmetic on t uses: float for floating types, long for int64, int for the rest
load(t, p, i)    the expression of element i of pointer p, as compute(t)
store(t, p, i, v)  the statement's expression that writes v, of type compute(t), to element i
load_4, store_4    the same for four neighbours as a vector of compute(t); element i lies on a multiple of four elements
</%doc>
<%!
STORED = {"float32": "float", "float16": "half", "bfloat16": "ushort", "int64": "long", "int32": "int", "int16": "short",
          "int8": "char", "uint8": "uchar", "bool": "uchar"}

def stored(t):
    return STORED[t]

def compute(t):
    return "float" if t in ("float32", "float16", "bfloat16") else "long" if t == "int64" else "int"

def load(t, p, i):
    if t == "float16":
        return f"vload_half((size_t)({i}), {p})"
    if t == "bfloat16":
        return f"bfloat16_load(({p})[{i}])"
    return f"({compute(t)})({p})[{i}]"

def store(t, p, i, v):
    if t == "float16":
        return f"vstore_half_rte({v}, (size_t)({i}), {p})"
    if t == "bfloat16":
        return f"({p})[{i}] = bfloat16_store({v})"
    if t == "bool":
        return f"({p})[{i}] = (uchar)(({v}) != 0)"
    return f"({p})[{i}] = ({STORED[t]})({v})"

def load_4(t, p, i):
    if t == "float16":
        return f"vloada_half4(0, {p} + {i})"
    vector = f"*(const __global {STORED[t]}4 *)({p} + {i})"
    if t == "bfloat16":
        return f"bfloat16_load_4({vector})"
    return vector if STORED[t] == compute(t) else f"convert_{compute(t)}4({vector})"

def store_4(t, p, i, v):
    if t == "float16":
        return f"vstorea_half4_rte({v}, 0, {p} + {i})"
    place = f"*(__global {STORED[t]}4 *)({p} + {i})"
    if t == "bfloat16":
        return f"{place} = bfloat16_store_4({v})"
    if t == "bool":
        return f"{place} = (uchar4)({v}.x != 0, {v}.y != 0, {v}.z != 0, {v}.w != 0)"
    return f"{place} = {v}" if STORED[t] == compute(t) else f"{place} = convert_{STORED[t]}4({v})"
%>
inline float bfloat16_load(ushort bits) { return as_float((uint)bits << 16); }

// To nearest, ties to even; a NaN stays one.
inline ushort bfloat16_store(float value) {
    const uint bits = as_uint(value);
    const uint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (ushort)(isnan(value) ? 0x7fc0u : rounded);
}

inline float4 bfloat16_load_4(ushort4 bits) { return as_float4(convert_uint4(bits) << 16); }

inline ushort4 bfloat16_store_4(float4 v) {
    return (ushort4)(bfloat16_store(v.x), bfloat16_store(v.y), bfloat16_store(v.z), bfloat16_store(v.w));
}
