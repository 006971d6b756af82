// CPU shape: the gradient of up to FORM rows, formed in local memory, rows PITCH apart. Tokens come in blocks, so that a block of x
// is in the cache for all the rows; within a block the sums of FORM rows by sixteen columns stay in registers.
#define TOKEN_BLOCK 64

inline void form_rows(__local float *formed, const __global float *x, const __global float *grad_out, const uint count, const uint n,
                      const uint tokens, const uint out) {
    const uint whole = n / 16 * 16;
    for (uint first = 0; first < tokens; first += TOKEN_BLOCK) {
        const uint last = min(first + TOKEN_BLOCK, tokens);
        for (uint j = 0; j < whole; j += 16) {
% for f in range(FORM):
            float8 low${f} = first ? vload8(0, formed + ${PITCH * f} + j) : (float8)(0.0f);
            float8 high${f} = first ? vload8(0, formed + ${PITCH * f} + j + 8) : (float8)(0.0f);
% endfor
            for (uint m = first; m < last; m++) {
                const float8 x_low = vload8(0, x + (size_t)m * n + j);
                const float8 x_high = vload8(0, x + (size_t)m * n + j + 8);
                const __global float *outgoing = grad_out + (size_t)m * out;
% for f in range(FORM):
                // Rows beyond the block's end repeat the last one, and nobody reads them.
                const float g${f} = outgoing[min(${f}u, count - 1)];
                low${f} += g${f} * x_low;
                high${f} += g${f} * x_high;
% endfor
            }
% for f in range(FORM):
            vstore8(low${f}, 0, formed + ${PITCH * f} + j);
            vstore8(high${f}, 0, formed + ${PITCH * f} + j + 8);
% endfor
        }
        for (uint f = 0; f < count; f++) {
            for (uint j = whole; j < n; j++) {
                float sum = first ? formed[${PITCH} * f + j] : 0.0f;
                for (uint m = first; m < last; m++) sum += grad_out[(size_t)m * out + f] * x[(size_t)m * n + j];
                formed[${PITCH} * f + j] = sum;
            }
        }
    }
}
