<%doc>
transpose_8(t, put)    puts the rows of the transpose of a0 .. a7, vectors of eight of type t; put(e, row) is the statement for row e

In three rounds: of pairs, of pairs of pairs, of halves. Lanes are named singly, two neighbours at a time: Oclgrind faults on what becomes
of v.s01 and v.lo.
</%doc>
<%!
def lanes(one, other, first, second, narrow=False):
    pairs = [(one, first), (one, second), (other, first), (other, second)]
    if not narrow:
        pairs = [(one, first), (other, first), (one, second), (other, second)]
    return ", ".join(f"{name}.s{at + i}" for name, at in pairs for i in (0, 1))
%>
<%def name="transpose_8(t, put)">
% for e in range(0, 8, 2):
            const ${t} b${e} = (${t})(${", ".join(f"a{e}.s{i}, a{e + 1}.s{i}" for i in (0, 1, 4, 5))});
            const ${t} b${e + 1} = (${t})(${", ".join(f"a{e}.s{i}, a{e + 1}.s{i}" for i in (2, 3, 6, 7))});
% endfor
% for e in (0, 1, 4, 5):
            const ${t} c${2 * e - e // 4 * 4} = (${t})(${lanes(f"b{e}", f"b{e + 2}", 0, 4)});
            const ${t} c${2 * e - e // 4 * 4 + 1} = (${t})(${lanes(f"b{e}", f"b{e + 2}", 2, 6)});
% endfor
% for e in range(4):
            ${put(e, f"({t})({lanes(f'c{e}', f'c{e + 4}', 0, 2, narrow=True)})")};
            ${put(e + 4, f"({t})({lanes(f'c{e}', f'c{e + 4}', 4, 6, narrow=True)})")};
% endfor
</%def>
