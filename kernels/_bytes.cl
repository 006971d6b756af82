<%doc>
Bytes in memory, WIDTH of them from a vector of integers. Expects GPU, ALIGNED and WIDTH, as _rows.cl has them.

put_bytes(p, left, bytes)    writes the low bytes of the first `left`; where ALIGNED all of them
</%doc>
inline void put_bytes(__global uchar *p, uint left, uint${WIDTH} bytes) {
% if GPU and ALIGNED:
    *(__global uchar4 *)p = convert_uchar4(bytes);
% else:
    if (left >= ${WIDTH}) {
        vstore${WIDTH}(convert_uchar${WIDTH}(bytes), 0, p);
        return;
    }
    uint own[${WIDTH}];
    vstore${WIDTH}(bytes, 0, own);
    for (uint i = 0; i < left; i++) p[i] = (uchar)own[i];
% endif
}
