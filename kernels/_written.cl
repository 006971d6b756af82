<%doc>
Weights as they are written, in vectors of WIDTH. Expects PARAM (float32, bfloat16 or float16), WIDTH, _quantize.cl.

written(p, u)    of 16-bit types: p rounded stochastically to a number of PARAM by the uniform numbers u, as memtrain_cl/reference/rounding.py
                 states it
</%doc>
% if PARAM == "bfloat16":
// Of the magnitude's bits the lower half is what lies between two numbers of the type.
inline vec written(vec p, vec u) {
    const uint${WIDTH} magnitude = magnitudes(p);
    const vec between = convert_float${WIDTH}(as_int${WIDTH}(magnitude & 0xffffu)) * 1.52587890625e-5f;
    const uint${WIDTH} up = as_uint${WIDTH}(u < between) & 0x10000u;
    const uint${WIDTH} rounded = min((magnitude & 0xffff0000u) + up, (uint${WIDTH})(0x7f7f0000u));
    const uint${WIDTH} kept = select(magnitude, rounded, magnitude < LEAST_INFINITE);
    return as_float${WIDTH}(kept | (as_uint${WIDTH}(p) & 0x80000000u));
}
% elif PARAM == "float16":
// Below 2^-14 numbers of the type lie 2^-24 apart; above, as many in each power of two.
inline vec written(vec p, vec u) {
    const uint${WIDTH} magnitude = magnitudes(p);
    const vec between = convert_float${WIDTH}(as_int${WIDTH}(magnitude & 0x1fffu)) * 1.220703125e-4f;
    const uint${WIDTH} up = as_uint${WIDTH}(u < between) & 0x2000u;
    const uint${WIDTH} normal = min((magnitude & 0xffffe000u) + up, (uint${WIDTH})(0x477fe000u));
    const vec small = as_float${WIDTH}(magnitude) * 16777216.0f;
    const vec below = floor(small);
    const vec rounded = select(below, below + 1.0f, u < small - below) * 5.9604644775390625e-8f;
    const uint${WIDTH} finite = select(as_uint${WIDTH}(rounded), normal, magnitude >= 0x38800000u);
    const uint${WIDTH} kept = select(magnitude, finite, magnitude < LEAST_INFINITE);
    return as_float${WIDTH}(kept | (as_uint${WIDTH}(p) & 0x80000000u));
}
% endif
