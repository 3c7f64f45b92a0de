// Lays a live plot over each drawn one, in the same box, when it comes into view.
(() => {
  "use strict";
  const { charts, panels } = JSON.parse(document.getElementById("data").textContent);
  const dashes = [[], [7, 3], [2, 2.5], [8, 3, 2, 3], [13, 4], [4, 2, 1, 2, 1, 2], [1, 4], [11, 3, 2, 3, 2, 3]];
  const shelf = 0.1; // the share of a logarithmic axis kept for exact zeros, as in axis.py
  const live = new Map();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const whole = (v) => (typeof v === "string" ? v : String(v));

  function place(chart, v) {
    if (!chart.log) return (v - chart.low) / (chart.high - chart.low);
    if (v <= 0) return 0;
    const low = Math.log10(chart.low), room = chart.zero ? shelf : 0;
    return room + ((1 - room) * (Math.log10(v) - low)) / (Math.log10(chart.high) - low);
  }
  function value(chart, p) {
    if (!chart.log) return chart.low + p * (chart.high - chart.low) - chart.base;
    const low = Math.log10(chart.low), room = chart.zero ? shelf : 0;
    if (p < room) return 0;
    return 10 ** (low + ((p - room) / (1 - room)) * (Math.log10(chart.high) - low));
  }

  const short = (v, digits) =>
    v === 0 ? "0" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5 ? String(+v.toFixed(digits)) : (+v.toPrecision(4)).toExponential().replace("e+", "e");

  // Round values between two places, for an axis that was zoomed; each as [place, label].
  function between(chart, low, high) {
    const a = value(chart, low), b = value(chart, high), found = [];
    const spot = (v) => place(chart, chart.base + v);
    if (chart.log && a > 0 && b / a > 8) {
      const first = Math.floor(Math.log10(a)), last = Math.ceil(Math.log10(b));
      const every = Math.ceil((last - first) / 6);
      for (let k = first; k <= last; k += every) {
        for (const m of b / a < 200 ? [1, 2, 5] : [1]) found.push(+`${m}e${k}`);
      }
      return found.filter((v) => v >= a && v <= b).map((v) => [spot(v), short(v, 3)]);
    }
    const raw = (b - a) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
    for (let k = Math.ceil(a / step); k * step <= b && found.length < 12; k += 1) found.push(k * step);
    const digits = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    return found.map((v) => [spot(v), short(v, digits)]);
  }

  // The reference under the lines of another arm, where both were recorded at the same steps.
  function shaded(chart, all, at) {
    const own = all[at], from = all[chart.shadow];
    if (!from || from === own || String(own.x) !== String(from.x)) return own;
    const [, ...look] = from.lines[0];
    return { x: own.x, y: [from.y[0], ...own.y], lines: [["reference", ...look], ...own.lines] };
  }

  // A missing record joins its neighbours; a value that is not finite breaks the line.
  const heights = (chart, values) =>
    values.map((v) => (v === null ? undefined : typeof v === "string" ? null : place(chart, v)));

  function marks(u, chart, panel, colours) {
    const { ctx } = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `700 ${13 * ratio}px sans-serif`;
    ctx.textAlign = "center";
    panel.y.forEach((values, line) => {
      if (!u.series[line + 1].show) return;
      ctx.fillStyle = colours[panel.lines[line][1]];
      let before = null;
      values.forEach((v, i) => {
        if (v === null) return;
        const odd = typeof v === "string" ? v : null;
        const x = u.valToPos(panel.x[i], "x", true);
        if (odd && odd !== before && x >= u.bbox.left && x <= u.bbox.left + u.bbox.width) {
          const y = odd === "-inf" ? u.bbox.top + u.bbox.height - 4 * ratio : u.bbox.top + 11 * ratio;
          ctx.fillText({ nan: "×", inf: "▲", "-inf": "▼" }[odd], x, y);
        }
        before = odd;
      });
    });
    ctx.restore();
  }

  function floor(u, chart) {
    if (chart.floor === null || chart.floor <= 0) return;
    const { ctx, bbox } = u;
    const top = Math.max(bbox.top, u.valToPos(chart.floor, "y", true)), end = bbox.top + bbox.height;
    if (top >= end) return;
    ctx.save();
    ctx.fillStyle = css("--floor");
    ctx.fillRect(bbox.left, top, bbox.width, end - top);
    ctx.restore();
  }

  function tooltip(chart, panel) {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    return {
      hooks: {
        init: (u) => u.over.append(tip),
        setCursor: (u) => {
          const { idx, left, top } = u.cursor;
          tip.hidden = idx == null || left < 0 || !u.over.matches(":hover");
          if (tip.hidden) return;
          const rows = panel.lines
            .map(([label, colour], i) => ({ label, colour, v: panel.y[i][idx], p: u.data[i + 1][idx] }))
            .filter((row) => row.v !== null)
            .sort((a, b) => (b.p ?? 2) - (a.p ?? 2));
          const head = document.createElement("b");
          head.textContent = `step ${panel.x[idx]}`;
          tip.replaceChildren(head, ...rows.map((row) => {
            const item = document.createElement("div");
            const swatch = item.appendChild(document.createElement("span"));
            swatch.className = `swatch c${row.colour}`;
            item.appendChild(document.createElement("span")).textContent = row.label;
            item.appendChild(document.createElement("span")).textContent = whole(row.v);
            return item;
          }));
          const right = left > u.over.clientWidth / 2;
          tip.style.left = right ? "auto" : `${left + 12}px`;
          tip.style.right = right ? `${u.over.clientWidth - left + 12}px` : "auto";
          tip.style.top = `${Math.max(0, Math.min(top - 10, u.over.clientHeight - 30))}px`;
        },
      },
    };
  }

  function build(box) {
    const chart = charts[box.dataset.chart], panel = shaded(chart, panels[box.dataset.chart], +box.dataset.panel);
    const colours = [0, 1, 2, 3, 4, 5, 6].map((n) => css(`--c${n}`));
    const soft = css("--soft"), rule = css("--rule"), sans = css("--sans");
    const edges = panel.lines.flatMap((line, i) => (line[3] ? [i + 1] : []));
    const sparse = panel.x.length <= 24;
    const axis = { stroke: soft, font: `11px ${sans}`, ticks: { show: false } };
    const span = chart.x[0] === chart.x[1] ? [chart.x[0] - 1, chart.x[1] + 1] : chart.x;
    const u = new uPlot({
      width: box.clientWidth, height: box.clientHeight, padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: true, y: true, uni: 24 }, sync: { key: `chart${box.dataset.chart}` }, points: { size: 6 } },
      scales: {
        x: { time: false, range: (_, low, high) => (low == null ? span : [Math.max(low, span[0]), Math.min(high, span[1])]) },
        y: { range: (u, low, high) => (u.zoomed && low != null ? [low, high] : [0, 1]) },
      },
      axes: [
        { ...axis, border: { show: true, stroke: soft, width: 1 }, size: 26, gap: 5, space: chart.height > 200 ? 80 : 60, grid: { show: false },
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7, 1e8, 1e9] },
        { ...axis, size: 52, gap: 6, space: 28, grid: { stroke: rule, width: 1 },
          splits: (u, _, low, high) => {
            u.labels = low <= 0 && high >= 1 ? chart.ticks : between(chart, low, high);
            return u.labels.map(([at]) => at);
          },
          values: (u) => u.labels.map(([, label]) => label) },
      ],
      bands: edges.flatMap((at, i) => (i % 2 ? [] : [{ series: [at, edges[i + 1]], fill: `${colours[panel.lines[at - 1][1]]}2a` }])),
      series: [{}, ...panel.lines.map(([label, colour, dash, edge]) => ({
        label, stroke: colours[colour], width: edge ? 1 : colour ? 1.75 : 4.5, alpha: colour || edge ? 1 : 0.5, dash: dashes[dash],
        points: { show: (u, i) => !edge && sparse, size: 5, fill: colours[colour], stroke: colours[colour] },
      }))],
      hooks: {
        drawClear: [(u) => floor(u, chart)],
        draw: [(u) => marks(u, chart, panel, colours)],
        setSelect: [(u) => { u.zoomed = u.select.height > 0 && u.select.height < u.over.clientHeight; }],
      },
      plugins: [tooltip(chart, panel)],
    }, [panel.x, ...panel.y.map((values) => heights(chart, values))], box);
    u.over.addEventListener("dblclick", () => { u.zoomed = false; });
    u.root.setAttribute("aria-hidden", "true"); // the drawing under it stays the one that is read out
    box.classList.add("live");
    live.set(box, u);
  }

  const boxes = document.querySelectorAll(".plot");
  if (!boxes.length) return;
  document.documentElement.classList.add("scripted");
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      build(target);
    }
  }, { rootMargin: "300px" });
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      live.get(target)?.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  // What is in view at once is built at once: an observer only reports after the first paint.
  const nearby = [...boxes].filter((box) => box.getBoundingClientRect().top < innerHeight + 300);
  nearby.forEach(build);
  boxes.forEach((box) => {
    sized.observe(box);
    if (!live.has(box)) seen.observe(box);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [box, u] of live) { u.destroy(); build(box); }
  });
})();
