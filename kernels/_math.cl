// Functions that elementwise bodies share.
#define INV_SQRT_2 0.70710678118654752440f
#define INV_SQRT_2PI 0.39894228040143267794f
#define SQRT_2_OVER_PI 0.79788456080286535588f

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp(-x)); }

inline float gelu_of(float x) { return 0.5f * x * (1.0f + erf(x * INV_SQRT_2)); }

inline float gelu_slope(float x) {
    return 0.5f * (1.0f + erf(x * INV_SQRT_2)) + x * exp(-0.5f * x * x) * INV_SQRT_2PI;
}

// (1 + tanh(u))/2 = sigmoid(2u), which keeps its digits where x is far below 0.
inline float gelu_tanh_share(float x) { return sigmoid_of(2.0f * SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)); }

inline float gelu_tanh_of(float x) { return x * gelu_tanh_share(x); }

inline float gelu_tanh_slope(float x) {
    const float s = gelu_tanh_share(x);
    return s + 2.0f * x * s * (1.0f - s) * SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

// Python's remainder: of the divisor's sign.
inline float remainder_of(float a, float b) {
    const float r = fmod(a, b);
    return (r != 0.0f && ((r < 0.0f) != (b < 0.0f))) ? r + b : r;
}

inline float floor_div(float a, float b) {
    if (b == 0.0f) return a / b;
    const float r = fmod(a, b);
    float q = (a - r) / b;
    if (r != 0.0f && ((b < 0.0f) != (r < 0.0f))) q -= 1.0f;
    if (q == 0.0f) return copysign(0.0f, a / b);
    const float floored = floor(q);
    return (q - floored > 0.5f) ? floored + 1.0f : floored;
}

// Whole powers by squaring; negative exponents are refused before the launch or round towards zero as torch does.
inline long power_of_long(long base, long exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? ((exponent & 1) ? -1 : 1) : 0;
    long result = 1;
    while (exponent > 0) {
        if (exponent & 1) result *= base;
        base *= base;
        exponent >>= 1;
    }
    return result;
}
