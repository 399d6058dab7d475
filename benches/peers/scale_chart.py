"""The chart of `scale`: an SVG of the cost against a count on a logarithmic axis, one line for each dimension.

Must not know: how a figure was measured. Invariants: the same figures give the same bytes; the chart is readable on a
light and on a dark page, and without colour, since each line has a label and a dash pattern of its own.
"""

import math
from html import escape

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 58, 62
LABEL_DISTANCE = 17
# Colours of a light and of a dark page, and the dashes of the lines.
LINES = [("#1b5e9e", "#7db8ee", ""), ("#a8440b", "#f2a36b", "7 3"), ("#1f6b3a", "#7fcf9b", "2 3"),
         ("#7a2a86", "#d79be0", "9 3 2 3"), ("#555555", "#bbbbbb", "1 4")]


def style():
    def rules(at):
        colours = enumerate(line[at] for line in LINES)
        lines = "".join(f".l{number}{{stroke:{colour}}}.t{number}{{fill:{colour}}}" for number, colour in colours)
        ink, faint, page = (("#1f2328", "#d0d7de", "#ffffff"), ("#e6edf3", "#3d444d", "#0d1117"))[at]
        return f"text{{fill:{ink}}}.grid{{stroke:{faint}}}.page{{fill:{page}}}{lines}"
    return (f"text{{font:12px sans-serif}}.title{{font-size:15px;font-weight:600}}.line{{fill:none;stroke-width:2}}"
            f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}")


def ticks(highest):
    """Round values from 0 to at least `highest`."""
    step = 10 ** math.floor(math.log10(highest))
    step = next(part * step for part in (0.1, 0.2, 0.5, 1, 2) if highest / (part * step) <= 6)
    return [number * step for number in range(math.ceil(highest * 1.05 / step) + 1)]


def spread_labels(places):
    """Moves labels apart, so that no two overlap: the new height of each name."""
    free, moved = -math.inf, {}
    for name, height in sorted(places.items(), key=lambda place: (place[1], place[0])):
        moved[name] = free = max(height, free + LABEL_DISTANCE)
    excess = max(0, max(moved.values()) - (HEIGHT - BOTTOM))
    return {name: height - excess for name, height in moved.items()}


def draw(series, title, subtitle, unit):
    """The SVG. `series`: the name of each dimension with its points, (count, cost)."""
    points = [point for line in series.values() for point in line]
    most, marks = max(count for count, _ in points), ticks(max(cost for _, cost in points))
    decades = max(1, math.ceil(math.log10(most) - 1e-9))

    def x(count):
        return LEFT + math.log10(count) / decades * (WIDTH - LEFT - RIGHT)

    def y(cost):
        return HEIGHT - BOTTOM - cost / marks[-1] * (HEIGHT - TOP - BOTTOM)

    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    out = [f'{svg} aria-label="{escape(title)}">',
           f"<style>{style()}</style>", f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
           f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
           f'<text x="{LEFT}" y="43">{escape(subtitle)}</text>']
    for mark in marks:
        out.append(f'<path class="grid" d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for decade in range(decades + 1):
        place = x(10 ** decade)
        out.append(f'<path class="grid" d="M{place:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        out.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10 ** decade:,}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 40}" text-anchor="middle">'
               f"number of what the line's label names (log scale)</text>")
    height = (TOP + HEIGHT - BOTTOM) / 2
    out.append(f'<text x="18" y="{height:.1f}" text-anchor="middle" transform="rotate(-90 18 {height:.1f})">'
               f"{escape(unit)}</text>")
    labels = spread_labels({name: y(line[-1][1]) for name, line in series.items()})
    for number, (name, line) in enumerate(series.items()):
        dash = f' stroke-dasharray="{LINES[number][2]}"' if LINES[number][2] else ""
        path = "L".join(f"{x(count):.1f} {y(cost):.1f}" for count, cost in line)
        out.append(f'<path class="line l{number}"{dash} d="M{path}"/>')
        out += [f'<circle class="t{number}" cx="{x(count):.1f}" cy="{y(cost):.1f}" r="3"/>' for count, cost in line]
        end = line[-1]
        out.append(f'<path class="l{number}" stroke-opacity="0.4" d="M{x(end[0]) + 4:.1f} {y(end[1]):.1f}'
                   f'L{WIDTH - RIGHT + 6} {labels[name]:.1f}"/>')
        out.append(f'<text class="t{number}" x="{WIDTH - RIGHT + 10}" y="{labels[name] + 4:.1f}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
