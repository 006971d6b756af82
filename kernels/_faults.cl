// What a kernel found wrong in its data, kept on the device until the host next waits for it (memtrain_cl/faults.py).
<%!
FAULT_INDEX = 1        # value: the index, limit: the size
FAULT_PROBABILITY = 2  # value: the row
FAULT_EMPTY = 3        # value: the row whose probabilities are all 0
FAULT_ROW = 4          # value: the row that is not finite
%>
// The first report stays.
inline void report(volatile __global long *faults, const int kind, const long value, const long limit) {
    if (atomic_cmpxchg((volatile __global int *)faults, 0, kind) == 0) {
        faults[1] = value;
        faults[2] = limit;
    }
}
