"""The table of a run, and Keyward's figures beside their targets.

A ratio is the median of the ratios of single rounds, since both figures of a round met the same machine.
"""

import statistics

# Title, row, figure, of whom, compared with whom, must, aim. Compared with None: the figure itself.
# Compared with "added NAME": the excess over direct, as a share of the excess of NAME.
TARGETS = [
    ("CPU per call 8x8, × bare", "Range 256 B 8x8", "cost", "bare", 1.25, None),
    ("CPU per call 64x4, × bare", "Range 256 B 64x4", "cost", "bare", 1.25, None),
    ("CPU per call 8x8, × Envoy", "Range 256 B 8x8", "cost", "envoy", 0.60, 0.45),
    ("CPU per call 64x4, × Envoy", "Range 256 B 64x4", "cost", "envoy", 0.60, 0.45),
    ("CPU per call 8x8, × HAProxy", "Range 256 B 8x8", "cost", "haproxy", 0.40, 0.28),
    ("CPU per call 8x8, × nginx", "Range 256 B 8x8", "cost", "nginx", 0.35, 0.25),
    ("CPU per call 8x8 before etcd, × bare", "Range 256 B 8x8, etcd", "cost", "bare", 1.25, None),
    ("CPU per call 8x8 before etcd, × grpc-proxy", "Range 256 B 8x8, etcd", "cost", "grpc-proxy", 0.30, 0.20),
    ("CPU per Put 8x8 before etcd, × grpc-proxy", "Put 256 B 8x8, etcd", "cost", "grpc-proxy", 0.30, 0.20),
    ("etcd's CPU per call 8x8, × direct", "Range 256 B 8x8, etcd", "member", "direct", 1.20, 1.05),
    ("proxy's and etcd's CPU per call 8x8, × direct", "Range 256 B 8x8, etcd", "whole", "direct", 1.60, None),
    ("proxy's and etcd's CPU per call 64x4, × direct", "Range 256 B 64x4, etcd", "whole", "direct", 1.35, None),
    ("added p50 at one stream, × Envoy's", "Range 256 B 1x1", "p50", "added envoy", 0.75, 0.55),
    ("added p99 at one stream, × Envoy's", "Range 256 B 1x1", "p99", "added envoy", 0.75, 0.45),
    ("64 KiB values: CPU per call 8x8, × bare", "Range 64 KiB 8x8", "cost", "bare", 1.1, None),
    ("64 KiB values: CPU per call 8x8, × Envoy", "Range 64 KiB 8x8", "cost", "envoy", 0.95, 0.75),
    ("watch: CPU per event, × bare", "watch, 1,000 streams, etcd", "cost", "bare", 1.5, None),
    ("watch, 100 per stream: CPU per event, × bare", "watch, 100 per stream, etcd", "cost", "bare", 1.5, None),
    ("watch: CPU per event, × Envoy", "watch, 1,000 streams, etcd", "cost", "envoy", 0.50, 0.35),
    ("watch: CPU per event, × grpc-proxy", "watch, 1,000 streams, etcd", "cost", "grpc-proxy", 0.30, 0.20),
    ("watch: delivery p50, × direct", "watch, 1,000 streams, etcd", "p50", "direct", 1.35, 1.10),
    ("watch, 100 per stream: delivery p50, × direct", "watch, 100 per stream, etcd", "p50", "direct", 1.35, 1.10),
    ("first event p50, × direct", "first event, etcd", "p50", "direct", 1.3, None),
    ("Lock and Unlock p50, × direct", "Lock and Unlock, etcd", "p50", "direct", 1.3, None),
    ("Queue round trip p50, × direct", "queue round trip, etcd", "p50", "direct", 1.3, None),
    ("Authenticate calls at the member for 1,000 logins of one user", "1,000 logins of one user: at the member", "cost",
     None, 1, None),
    ("p99 of others beside a greedy connection, × alone", "polite calls: p99, beside × alone", "cost", None, 2, None),
    ("memory per idle watch, KiB", "idle: per watch", "cost", None, 8, 4),
    ("memory per idle connection, KiB", "idle: per connection", "cost", None, 34, 16),
    ("memory of the idle process, KiB", "idle: process", "cost", None, 30 * 1024, 12 * 1024),
]


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def spread(values):
    """Half the range over the median: ± of the median."""
    values = [value for value in values if value is not None]
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle and len(values) > 1 else None


def figures(samples, row, peer, figure):
    return [sample.get(figure) for sample in samples.get(row, {}).get(peer, [])]


def ratios(samples, row, peer, figure, other):
    own, others = figures(samples, row, peer, figure), figures(samples, row, other, figure)
    return [a / b for a, b in zip(own, others) if a is not None and b]


def added(samples, row, figure, other):
    own, others = figures(samples, row, "keyward", figure), figures(samples, row, other, figure)
    direct = figures(samples, row, "direct", figure)
    return [(a - d) / (b - d) for a, b, d in zip(own, others, direct) if None not in (a, b, d) and b > d]


def number(value):
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


# Units of figures that other work on the machine changes little: memory, counts, ratios of neighbours in time.
STEADY_UNITS = ("KiB", "calls", "×")


def percent(value):
    return "-" if value is None else f"±{100 * value:.0f} %"


def print_table(lines, titles=1):
    """Prints a Markdown table; the first `titles` columns are texts, the others figures."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for at, line in enumerate(lines):
        cells = [cell.ljust(width) if column < titles else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(line, widths))]
        print("| " + " | ".join(cells) + " |")
        if at == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def show(samples, faults, missing, units, unquiet, absolute):
    """Prints the table. Times and costs of a machine with other work are withheld; ratios and memory are not."""
    whole = not unquiet or absolute
    if unquiet:
        print("The machine is not quiet: " + "; ".join(unquiet) + ".")
        print("Absolute figures are printed on demand, and cannot be trusted.\n" if absolute
              else "Times, rates and costs are withheld; ratios of figures of the same round are printed.\n")
    head = ["measure", "proxy", "cost", "unit", "spread", "× bare", "spread"]
    head += ["member µs", "per second", "p50 µs", "p99 µs"] if whole else []
    lines = [head + ["p50 × direct", "whole × direct"]]
    for row, by_peer in samples.items():
        for peer, of_peer in by_peer.items():
            unit = of_peer[0].get("unit") or units[row]
            lines.append(table_line(samples, row, peer, of_peer, unit, whole))
    print_table(lines, titles=2)
    for (row, peer), fault in faults.items():
        print(f"FAILED: {row}, {peer}: {fault}")
    for peer, reason in missing.items():
        print(f"missing: {peer}: {reason}")


def table_line(samples, row, peer, of_peer, unit, whole):
    costs = [sample.get("cost") for sample in of_peer]
    to_bare = ratios(samples, row, peer, "cost", "bare")
    shown = whole or unit in STEADY_UNITS
    line = [row, peer, number(median(costs)) if shown else "-", unit, percent(spread(costs)) if shown else "-",
            number(median(to_bare)), percent(spread(to_bare))]
    if whole:
        columns = ("member", "rate", "p50", "p99")
        line += [number(median([sample.get(figure) for sample in of_peer])) for figure in columns]
    return line + [number(median(ratios(samples, row, peer, figure, "direct"))) for figure in ("p50", "whole")]


def show_targets(samples):
    lines, unmeasured = [["Keyward's target", "must", "aim", "measured", "spread", "verdict"]], []
    for title, row, figure, other, must, aim in TARGETS:
        if row not in samples:
            continue
        if other is None:
            values = [value for value in figures(samples, row, "keyward", figure) if value is not None]
        elif other.startswith("added "):
            values = added(samples, row, figure, other.removeprefix("added "))
        else:
            values = ratios(samples, row, "keyward", figure, other)
        measured = median(values)
        if measured is None:
            unmeasured.append(title)
            continue
        verdict = "missed" if measured > must else "aim" if aim and measured <= aim else "must"
        lines.append([title, f"≤ {number(must)}", f"≤ {number(aim)}" if aim else "-", number(measured),
                      percent(spread(values)), verdict])
    if len(lines) > 1:
        print()
        print_table(lines)
    if unmeasured:
        print("not measured: " + "; ".join(unmeasured))
