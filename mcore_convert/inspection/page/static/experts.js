// A heat map of one weight of the experts: a row per layer, a cell per expert.
function showExperts(data) {
  const { matrices } = data;
  const state = { measure: data.measures[0].key, matrix: 0 };
  const write = writerOf(data);
  const matrix = () => matrices[state.matrix];
  const label = ({ name, state: kind }) => shorten(name) + (kind === "param" ? "" : ` (${kind})`);
  const notesOf = (layer, expert) => matrix().notes[`${layer},${expert}`] ?? [];

  function cell(row, expert) {
    const layer = matrix().layers[row];
    const step = matrix().steps[state.measure][row][expert];
    const notes = notesOf(layer, expert);
    const value = write(state.measure, matrix().values[state.measure][row][expert]);
    const remark = notes.length ? `, stands out: ${notes.join("; ")}` : "";
    return make("div", {
      role: "gridcell", tabindex: -1, "data-row": row, "data-expert": expert, "data-layer": layer, "data-step": step,
      class: `cell ${step === null ? "none" : `s${step}`}${notes.length ? " noted" : ""}`,
      "aria-label": `layer ${layer}, expert ${expert}: ${step === null ? "none" : value}${remark}`,
    });
  }

  // All numbers of a cell, below the map, and a comparison with the other experts of its layer.
  function read(row, expert) {
    const layer = matrix().layers[row];
    const of = (key) => matrix().values[key][row][expert];
    const values = data.measures.map(({ key, label: word }) => `${word} ${write(key, of(key))}`);
    byId("expert-readout").replaceChildren(
      make("b", { class: "mono" }, named(matrix().name.replace("{layer}", layer).replace("{expert}", expert))),
      make("span", { class: "muted" }, ` layer ${layer}, expert ${expert}, ${shapeOf(matrix().shape)}`), make("br"),
      values.join(" · "), compared(row, expert), ...remarks(notesOf(layer, expert)));
  }

  function compared(row, expert) {
    const measure = data.measures.find(({ key }) => key === state.measure);
    const values = matrix().values[state.measure][row];
    const known = values.filter((value) => typeof value === "number").sort((left, right) => left - right);
    const median = (known[(known.length - 1) >> 1] + known[known.length >> 1]) / 2;
    if (measure.style !== "number" || typeof values[expert] !== "number" || !median) return "";
    return make("div", { class: "muted" },
      `${measure.label} is ${digits(values[expert] / median)} times the median of the layer's ${known.length} experts`);
  }

  function show() {
    const { layers, count } = matrix();
    const every = Math.max(1, Math.ceil(count / 16)); // so many experts get a number
    const measure = data.measures.find(({ key }) => key === state.measure);
    const rows = layers.map((layer, row) => make("div", { class: "row", role: "row" },
      make("span", { class: "name", role: "rowheader" }, make("span", { class: "sr" }, "layer "), layer),
      make("div", { class: "cells", role: "presentation" }, times(count, (expert) => cell(row, expert)))));
    const scale = make("div", { class: "row scale", "aria-hidden": "true" }, make("span", { class: "name" }, "layer"),
      make("div", { class: "cells" }, times(count, (expert) => make("span", {}, expert % every ? "" : expert))));
    byId("experts").replaceChildren(make("div", {
      class: "heat experts", role: "grid", style: `--experts:${count}`,
      "aria-label": `${measure.label} of ${label(matrix())} by layer and expert`,
    }, scale, rows));
    byId("expert-ramp").replaceChildren(
      ...rampOf(data, measure, measure.perRow,
        measure.perRow ? ["lowest expert of all layers", "highest"] : ["none", "most"]));
    byId("experts").querySelector(".cell:not(.none)")?.setAttribute("tabindex", "0");
  }

  for (const event of ["mouseover", "focusin"]) {
    byId("experts").addEventListener(event, ({ target }) => {
      if (target.dataset.expert !== undefined) read(Number(target.dataset.row), Number(target.dataset.expert));
    });
  }
  byId("experts").addEventListener("click", ({ target }) => target.dataset.expert !== undefined && target.focus());
  const pick = make("label", {}, "weight", make("select", { id: "expert-weight", on: { change: ({ target }) => {
    state.matrix = Number(target.value);
    show();
  } } }, matrices.map((each, number) => make("option", { value: number }, label(each)))));
  byId("expert-measures").replaceChildren(
    ...choices("Measure of experts", data.measures.map(({ key, label: word }) => [key, word]), state.measure, (value) => {
      state.measure = value;
      show();
    }), make("div", { class: "choose" }, pick));
  moveWith(byId("experts"), ".cell", () => matrix().count);
  show();
}
if (dataOf("data-experts")) showExperts(dataOf("data-experts"));
