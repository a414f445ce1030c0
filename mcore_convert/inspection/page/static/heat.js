// A group of buttons, one of them pressed.
function choices(label, options, pressed, press) {
  if (options.length < 2) return [];
  const group = make("div", { class: "tabs", role: "group", "aria-label": label });
  group.append(...options.map(([value, text]) => make("button", {
    type: "button", "data-value": value, "aria-pressed": String(value === pressed), on: { click: () => {
      for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
      press(value);
    } },
  }, text)));
  return [group];
}

// The colours of a measure, from `lowest` to `highest`.
function rampOf(data, measure, isRelative, [lowest, highest]) {
  const first = isRelative ? 1 : 0; // on a scale from nothing there is a colour for none
  return [
    lowest, make("span", { class: "ramp", "aria-hidden": "true" },
      times(data.steps + 1 - first, (step) => make("i", { class: `s${step + first}` }))), highest,
    make("span", {}, `(${measure.explained}${measure.style === "number" ? ", on a logarithmic scale" : ""})`),
  ];
}

const writerOf = (data) => (key, value) =>
  written[data.measures.find((measure) => measure.key === key).style](value);
const shorten = (name) => name.replace("decoder.layers.{layer}.", "").replace("{expert}", "*");
const remarks = (notes) =>
  notes.map((note) => make("div", {}, make("span", { class: "tag nan" }, "stands out"), ` ${note}`));

// A heat map: a row per weight, a cell per layer, coloured by the chosen measure.
function showHeat(data) {
  const state = { measure: data.measures[0].key, state: data.states[0] };
  const measureOf = (key) => data.measures.find((measure) => measure.key === key);
  const write = writerOf(data);

  function cell(row, number) {
    const layer = data.layers[number];
    const step = row.steps[state.measure][number];
    const notes = row.notes[layer] ?? [];
    const value = write(state.measure, row.values[state.measure][number]);
    const remark = notes.length ? `, stands out: ${notes.join("; ")}` : "";
    const describe = () => read(row, number, notes);
    return make("div", {
      role: "gridcell", tabindex: -1, "data-layer": layer, "data-step": step,
      class: `cell ${step === null ? "none" : `s${step}`}${notes.length ? " noted" : ""}`,
      "aria-label": `layer ${layer}: ${step === null ? "none" : value}${remark}`,
      on: { mouseenter: describe, focus: describe, click: ({ currentTarget }) => currentTarget.focus() },
    });
  }

  // All numbers of a cell, below the map.
  function read(row, number, notes) {
    const name = row.name.replace("{layer}", data.layers[number]).replace("{expert}", "*");
    const what = row.each > 1 ? `${row.each} experts together` : shapeOf(row.shape);
    const values = data.measures.map(({ key, label }) => `${label} ${write(key, row.values[key][number])}`);
    byId("readout").replaceChildren(make("b", { class: "mono" }, named(name)),
      make("span", { class: "muted" }, ` ${what}`), make("br"), values.join(" · "),
      ...remarks(notes));
  }

  function show() {
    const measure = measureOf(state.measure);
    const every = Math.max(1, Math.ceil(data.layers.length / 16)); // so many layers get a number
    const rows = data.rows.filter((row) => row.state === state.state).map((row) => make("div",
      { class: "row", role: "row", "data-name": row.name },
      make("code", { class: "name", role: "rowheader", title: row.name }, make("bdi", {}, shorten(row.name))),
      make("div", { class: "cells", role: "presentation" }, data.layers.map((_, number) => cell(row, number)))));
    const scale = make("div", { class: "row scale", "aria-hidden": "true" }, make("span", { class: "name" }),
      make("div", { class: "cells" },
        data.layers.map((layer, number) => make("span", {}, number % every ? "" : layer))));
    byId("heat").replaceChildren(make("div",
      { class: "heat", role: "grid", "aria-label": `${measure.label} by weight and layer` }, rows, scale));
    byId("ramp").replaceChildren(...rampOf(data, measure, measure.perRow,
      measure.perRow ? ["lowest layer of each weight", "highest"] : ["none", "most"]));
    byId("heat").querySelector(".cell:not(.none)")?.setAttribute("tabindex", "0");
  }

  // Outliers are listed beside the map, with links to their cells.
  function goTo([name, ofState, layer]) {
    if (ofState !== state.state) document.querySelector(`#measures [data-value="${CSS.escape(ofState)}"]`)?.click();
    const row = [...byId("heat").querySelectorAll(".row")].find((each) => each.dataset.name === name);
    row?.querySelector(`[data-layer="${layer}"]`)?.focus();
  }

  const choose = (key) => (value) => {
    state[key] = value;
    show();
  };
  byId("measures").replaceChildren(
    ...choices("Measure", data.measures.map(({ key, label }) => [key, label]), state.measure, choose("measure")),
    ...choices("State", data.states.map((each) => [each, each === "param" ? "weights" : each]), state.state,
      choose("state")));
  for (const link of document.querySelectorAll("[data-cell]")) {
    link.addEventListener("click", () => goTo(JSON.parse(link.dataset.cell)));
  }
  moveWith(byId("heat"), ".cell", () => data.layers.length);
  show();
}
if (dataOf("data-heat")?.rows.length) showHeat(dataOf("data-heat"));
