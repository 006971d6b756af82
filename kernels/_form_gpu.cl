// GPU shape: an item forms its own groups of four columns (q = lid + WG_SIZE * m) of up to FORM rows, in registers, and puts them down
// for the rows to take up one after the other. Items read neighbouring groups of x; grad_out's are the same for all.
inline void form_groups(float4 *formed, const __global float *x, const __global float *grad_out, const uint count, const uint n,
                        const uint tokens, const uint out) {
    const uint last_group = (n + 3) / 4 - 1;
    const uint lid = get_local_id(0);
% for m in range(HELD):
    const uint q${m} = min(lid + ${WG_SIZE * m}, last_group);
% for f in range(FORM):
    float4 sum${f}_${m} = (float4)(0.0f);
% endfor
% endfor
    for (uint token = 0; token < tokens; token++) {
        const __global float *row = x + (size_t)token * n;
        const __global float *outgoing = grad_out + (size_t)token * out;
% for m in range(HELD):
        const float4 x${m} = load_grad_4(row, q${m}, n);
% endfor
% for f in range(FORM):
        {
            // Rows beyond the last repeat it, and nobody reads them.
            const float g = outgoing[min(${f}u, count - 1)];
% for m in range(HELD):
            sum${f}_${m} += g * x${m};
% endfor
        }
% endfor
    }
% for m in range(HELD):
% for f in range(FORM):
    formed[${HELD * f + m}] = sum${f}_${m};
% endfor
% endfor
}
