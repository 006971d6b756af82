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
    // Not two.x + two.y of a vector: compilers make a shuffle with an undefined lane of it, on which Oclgrind's check for
    // uninitialised values ends the process.
    float two[2];
    vstore2(lanes.lo + lanes.hi, 0, two);
    return two[0] + two[1];
}

inline float halve_8(float8 lanes) { return halve_4(lanes.lo + lanes.hi); }

// Any order will do for whole numbers; through memory for the same reason.
inline uint sum_8(uint8 counts) {
    uint four[4];
    vstore4(counts.lo + counts.hi, 0, four);
    return four[0] + four[1] + four[2] + four[3];
}
