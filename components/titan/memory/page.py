"""A timeline as one HTML file: the picture as SVG, and figures under the pointer."""

import html
import json
from itertools import pairwise
from pathlib import Path

from components.titan.memory.picture import COLORS, POINTS, WORK_COLORS, unit_of
from components.titan.memory.report import report
from components.titan.memory.timeline import CATEGORIES, Timeline

WIDTH, HEIGHT, STRIP = 1200, 480, 40
"""Drawing area of the curves, and the height of the phases above them, in SVG units."""


def write_page(timeline: Timeline, file: Path) -> None:
    """Write a self-contained page."""
    legend = "".join(
        f'<span><i style="background:{COLORS[name]}"></i>{name}</span>' for name in CATEGORIES
    ) + "".join(f'<span><i style="background:{c}"></i>{w}</span>' for w, c in WORK_COLORS.items())
    page = _PAGE.format(
        title=html.escape(timeline.title),
        legend=legend,
        view=f"0 0 {WIDTH} {STRIP + HEIGHT}",
        drawing=_strip(timeline) + _areas(timeline),
        line=f'y1="0" y2="{STRIP + HEIGHT}"',
        report=html.escape(report(timeline)),
        data=_data(timeline).replace("</", "<\\/"),
    )
    file.write_text(page)


def _x(timeline: Timeline, time: float) -> float:
    return round(WIDTH * time / max(timeline.duration, 1e-9), 2)


def _strip(timeline: Timeline) -> str:
    ends = [phase.start for phase in timeline.phases[1:]] + [timeline.duration]
    parts = []
    for phase, end in zip(timeline.phases, ends, strict=True):
        left, right = _x(timeline, phase.start), _x(timeline, end)
        color, name = WORK_COLORS[phase.work], html.escape(phase.name)
        place = f'x="{left}" width="{max(right - left, 0):.2f}"'
        box = f'<rect {place} y="0" height="{STRIP}" fill="{color}"><title>{name}</title></rect>'
        parts.append(box)
    return "".join(parts)


def _areas(timeline: Timeline) -> str:
    picked = timeline.thinned(POINTS)
    times = [_x(timeline, t) for t in timeline.times[picked]] + [float(WIDTH)]
    scale = HEIGHT / max(timeline.peak.nbytes, 1)
    floor = [0.0] * len(picked)
    parts = []
    for name, curve in zip(CATEGORIES, timeline.curves[:, picked], strict=True):
        top = [a + float(b) * scale for a, b in zip(floor, curve, strict=True)]
        outline = [*_steps(times, top), *reversed(_steps(times, floor))]
        points = " ".join(f"{x},{STRIP + HEIGHT - y:.2f}" for x, y in outline)
        parts.append(f'<polygon points="{points}" fill="{COLORS[name]}"/>')
        floor = top
    return "".join(parts)


def _steps(times: list[float], heights: list[float]) -> list[tuple[float, float]]:
    corners = []
    for (left, right), height in zip(pairwise(times), heights, strict=True):
        corners += [(left, height), (right, height)]
    return corners


def _data(timeline: Timeline) -> str:
    picked = timeline.thinned(POINTS)
    times = [float(timeline.times[index]) for index in picked]
    unit, scale = unit_of(timeline.peak.nbytes)
    names: dict[str, int] = {}
    at = [names.setdefault(timeline.module_at(time), len(names)) for time in times]
    return json.dumps(
        {
            "categories": list(CATEGORIES),
            "duration": timeline.duration,
            "unit": unit,
            "scale": scale,
            "times": times,
            "bytes": timeline.curves[:, picked].T.tolist(),
            "phases": [[phase.start, phase.name] for phase in timeline.phases],
            "modules": list(names),
            "module": at,
        }
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 1.5em; max-width: 1300px; }}
svg {{ width: 100%; height: auto; border: 1px solid #999; }}
#legend span {{ margin-right: 1em; white-space: nowrap; }}
#legend i {{ display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.3em; }}
#now {{ font-family: monospace; white-space: pre-wrap; min-height: 11em; }}
</style>
</head>
<body>
<h1 style="font-size:1.2em">{title}</h1>
<p id="legend">{legend}</p>
<svg id="plot" viewBox="{view}" preserveAspectRatio="none">{drawing}
<line id="cursor" x1="0" x2="0" {line} stroke="black" stroke-width="1"/>
</svg>
<p id="now">Point at the picture: bytes by category, phase and module at that moment.</p>
<pre>{report}</pre>
<script type="application/json" id="data">{data}</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const plot = document.getElementById("plot"), cursor = document.getElementById("cursor");
const now = document.getElementById("now"), width = plot.viewBox.baseVal.width;
function last(values, time, of) {{
  let low = 0, high = values.length;
  while (low < high) {{
    const middle = (low + high) >> 1;
    if (of(values[middle]) <= time) low = middle + 1; else high = middle;
  }}
  return Math.max(low - 1, 0);
}}
plot.addEventListener("mousemove", event => {{
  const box = plot.getBoundingClientRect();
  const time = data.duration * (event.clientX - box.left) / box.width;
  const index = last(data.times, time, value => value);
  const phase = data.phases[last(data.phases, time, value => value[0])][1];
  const bytes = data.bytes[index], total = bytes.reduce((a, b) => a + b, 0);
  const show = value => (value / data.scale).toFixed(2).padStart(10) + " " + data.unit + "  ";
  const rows = data.categories.map((name, row) => show(bytes[row]) + name).reverse();
  const module = data.modules[data.module[index]];
  const head = (1000 * time).toFixed(1) + " ms: " + phase + (module ? ", in " + module : "");
  now.textContent = [head, show(total) + "total", ...rows].join("\\n");
  cursor.setAttribute("x1", width * time / data.duration);
  cursor.setAttribute("x2", width * time / data.duration);
}});
</script>
</body>
</html>
"""
