<%doc>
The one summation order: 1024 virtual lanes, element j in lane j mod 1024, each lane summed in ascending j, then the lanes are
halved 512, 256 ... 1. Lanes beyond the row's end hold zero, so a short row may start at the first power of two that covers it.

halving_tree(names) gives the expression that adds a list of equally spaced lane units in that order: first the upper half
onto the lower, then again, down to one.
</%doc>
<%!
def halving_tree(names):
    names = list(names)
    while len(names) > 1:
        half = len(names) // 2
        names = [f"({low} + {high})" for low, high in zip(names[:half], names[half:])]
    return names[0]
%>
// The last four lanes of a unit: x+z and y+w, then one.
inline float halve_4(float4 lanes) {
    const float2 two = lanes.lo + lanes.hi;
    return two.x + two.y;
}

inline float halve_8(float8 lanes) { return halve_4(lanes.lo + lanes.hi); }
