"use strict";
(() => {
  const { charts, library, records } = JSON.parse(document.getElementById("data").textContent);

  // Tables: a button in each head sorts, a field above filters.
  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    const value = (row, column) => {
      const cell = row.cells[column];
      return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent;
    };
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
        body.append(...(down ? rows.reverse() : rows));
        merge(body);
      });
    });
    merge(body);
    if (body.rows.length > 5) table.parentNode.before(filterOf(table, body));
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === "number") return -1;  // what is unknown comes last
    if (typeof b === "number") return 1;
    return a.localeCompare(b, "en", { numeric: true });
  }

  // A line's first cells are blank as long as they say what those of the line above do.
  function merge(body) {
    let above = [];
    for (const row of [...body.rows].filter((row) => !row.hidden)) {
      let same = true;
      [...row.cells].slice(0, 3).forEach((cell, at) => {
        same = same && at + 1 < row.cells.length && above[at] === cell.textContent;
        cell.classList.toggle("again", same);
      });
      above = [...row.cells].map((cell) => cell.textContent);
    }
  }

  function filterOf(table, body) {
    const label = document.createElement("label");
    const field = document.createElement("input");
    label.className = "filter";
    field.type = "search";
    label.append("Show lines with ", field);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      merge(body);
    });
    return label;
  }

  // Undoes gzip and base64.
  function unpacked(text) {
    const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  const drawable = unpacked(charts).then(JSON.parse);
  const ready = unpacked(library).then((source) => {  // the page's policy admits it by its hash
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
  });

  // Charts: each drawing becomes interactive when it comes into view.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function showTip(_handler, event, _item, value) {
    if (!value) {
      tip.hidden = true;
      return;
    }
    tip.replaceChildren(...Object.entries(value).filter(([, text]) => text !== "").map(([key, text]) => {
      const line = document.createElement("div");
      line.textContent = `${key}: ${text}`;
      return line;
    }));
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, top)}px`;
  }

  async function enliven(figure) {
    const drawing = figure.querySelector(".drawing");
    const isTimeline = figure.classList.contains("timeline");
    const place = document.createElement("div");
    const isNarrow = !isTimeline && !figure.classList.contains("wide") && drawing.clientWidth < 600;
    const chart = (await drawable)[figure.dataset.chart];
    const spec = isNarrow ? narrowed(chart, drawing.clientWidth) : chart;
    const options = {
      mode: "vega-lite", actions: false, ast: true, defaultStyle: false, tooltip: showTip,
      renderer: isTimeline ? "canvas" : "svg",
    };
    await ready;
    const { view } = await vegaEmbed(place, spec, options);
    for (const name of ["role", "aria-roledescription", "aria-label"]) {  // the figure is named instead
      for (const part of place.querySelectorAll(`[${name}]`)) part.removeAttribute(name);
    }
    drawing.replaceChildren(place);
    figure.dataset.marks = String(countMarks(view.scenegraph().root));
    figure.dataset.live = "yes";
    if (isTimeline) zoomByKeys(drawing, view);
  }

  // On a phone panels and a legend's entries lie below each other, and long names of lines too.
  function narrowed(chart, room) {
    const { datasets, ...rest } = chart;
    const names = Object.values(datasets).flat().map((row) => row.series || "");
    const areLong = names.some((name) => 6 * name.length > 0.3 * room);
    const fit = (key, value) => {
      if (areLong && key === "text" && value.field === "name") return { value: "" };
      if (areLong && value && value.field === "series" && value.legend === null) {
        return { ...value, legend: { columns: 1, symbolType: "stroke" } };
      }
      if (key === "columns") return 1;
      if (key === "labelLimit") return room - 60;
      return key === "width" && value > 100 ? Math.round(0.7 * room) : value;
    };
    return { ...JSON.parse(JSON.stringify(rest, fit)), datasets };
  }

  function countMarks(node) {
    if (["symbol", "rect"].includes(node.marktype) && node.role === "mark") return node.items.length;
    return (node.items || []).reduce((sum, item) => sum + countMarks(item), 0);
  }

  function zoomByKeys(drawing, view) {
    const whole = view.scale("x").domain().slice();
    const moves = {
      "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2],
    };
    drawing.addEventListener("keydown", (event) => {
      if (event.key !== "0" && !(event.key in moves)) return;
      event.preventDefault();
      const [low, high] = view.scale("x").domain();
      const [left, right] = moves[event.key] || [0, 0];
      const ends = event.key === "0" ? whole : [low + left * (high - low), high + right * (high - low)];
      view.signal("zoom_start", ends).run();
    });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      enliven(target);
    }
  }, { rootMargin: "200px" });
  for (const figure of document.querySelectorAll("figure[data-chart]")) seen.observe(figure);

  // While a sweep runs: ask how far it is, and load the page anew when cells have ended.
  const live = document.querySelector("form.live");
  if (live) {
    // The page stays: the sweep may end before it could load another one.
    live.addEventListener("submit", (event) => {
      event.preventDefault();
      live.querySelector("button").disabled = true;
      fetch(live.action, { method: "POST" }).catch(() => {});
    });
    setInterval(async () => {
      try {
        const progress = await (await fetch("progress")).json();
        live.querySelector("[role=status]").textContent = progress.text;
        live.querySelector("progress").value = progress.num_ended;
        if (String(progress.num_drawn) !== live.dataset.drawn && !progress.stopping) location.reload();
      } catch {
        live.querySelector("[role=status]").textContent = "The sweep has ended, or was stopped.";
        live.querySelector("button").disabled = true;
      }
    }, 2000);
  }

  // Records: one click saves all of them.
  unpacked(records).then((text) => {
    const found = JSON.parse(text), save = document.createElement("a"), line = document.createElement("p");
    save.textContent = `Save ${found.length} records as JSON`;
    save.download = "records.json";
    save.href = URL.createObjectURL(new Blob([JSON.stringify(found, null, 1)], { type: "application/json" }));
    line.append(save);
    document.querySelector("footer").append(line);
  });
})();
