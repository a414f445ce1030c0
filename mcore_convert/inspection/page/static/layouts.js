// The section on layouts: that of the checkpoint and a planned one, with a chosen rank and a chosen weight.
function showLayouts(data) {
  const numbers = layoutNumbers(data);
  const { weights, sizesInWords, stagesOf } = numbers;
  const layouts = { saved: data.saved, planned: { ...data.planned } };
  const titles = { saved: data.saved.isStored ? "As stored" : "Saved", planned: "Planned" };
  const isCut = (weight) => weight.place === "layer" && weight.dim !== null;
  const state = {
    which: "saved", rank: { tp: 0, pp: 0, ep: 0, etp: 0 }, weight: Math.max(0, weights.findIndex(isCut)), layer: 0, expert: 0,
  };
  const shown = () => layouts[state.which];

  function showMap() {
    const choose = (rank, chunk) => {
      state.rank = rank;
      settle();
      show();
      byId("map").querySelector(`[aria-pressed="true"][data-chunk="${chunk}"]`).focus();
    };
    byId("map").replaceChildren(mapOfRanks(numbers, shown(), state.rank, choose));
    byId("map").querySelector('[aria-pressed="true"]').tabIndex = 0;
  }

  function showRank() {
    byId("rank").replaceChildren(...contentOfRank(numbers, shown(), state.rank, state.weight, (number) => {
      chooseWeight(number);
      byId("rank").querySelector('[aria-pressed="true"]')?.focus({ preventScroll: true });
    }));
  }

  // The chosen weight is shown in a layer and an expert that the chosen rank has.
  function settle() {
    const { layers } = weights[state.weight];
    const there = numbers.layersIn(weights[state.weight], stagesOf(shown(), state.rank.pp));
    if (layers.length && !there.includes(state.layer)) state.layer = there[0] ?? layers[0];
    if (weights[state.weight].expert) {
      const [first, stop] = numbers.expertsOf(shown(), state.rank.ep);
      if (state.expert < first || state.expert >= stop) state.expert = first;
    }
  }

  function chooseWeight(number) {
    state.weight = number;
    settle();
    showRank();
    showWeight();
  }

  function showWeight() {
    const weight = weights[state.weight];
    const spell = (template) => template.replace("{layer}", state.layer).replace("{expert}", state.expert);
    const name = spell(weight.name);
    const select = (label, options, value, choose) => make("label", {}, label, make("select", {
      "data-pick": label, on: { change: (event) => {
        choose(Number(event.target.value));
        byId("weight").querySelector(`[data-pick="${label}"]`).focus();
      } },
    }, options.map((text, number) => make("option", { value: number, selected: number === value }, text))));
    const pick = (key, values) => select(key, values.map(String), values.indexOf(state[key]), (number) => {
      state[key] = values[number];
      showWeight();
    });
    const wasOpen = byId("weight").querySelector("details")?.open;
    byId("weight").replaceChildren(
      make("h3", { class: "mono" }, named(name)),
      make("p", { class: "sums" }, make("span", {}, shapeOf(weight.shape)), make("span", {}, numbers.howCut(weight))),
      make("div", { class: "choose" }, select("weight", weights.map(numbers.shortName), state.weight, chooseWeight),
        weight.place === "layer" ? pick("layer", weight.layers) : null,
        weight.expert ? pick("expert", times(numbers.numExperts, (expert) => expert)) : null),
      make("div", { class: "figures" }, Object.keys(layouts).map((which) => figure(which, name))),
      weight.bands.length ? make("p", { class: "legend" },
        weight.shape.length === 1 ? "Strip below: from" : "Strip at the left: from",
        weight.hf.map((hf, number) => make("span", {},
          make("i", { class: `band${number % 4}` }), hf.split(".").at(-2)))) : "",
      make("details", { open: wasOpen }, make("summary", {}, "As a table"),
        make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Pieces as a table" },
          Object.keys(layouts).map(table))),
      weight.hf.length ? make("p", { class: "small muted" }, "Hugging Face: ",
        weight.hf.map((hf, number) => [number ? ", " : "", make("code", {}, named(spell(hf)))])) : "");
  }

  function holders(layout) {
    const { pp, ep } = numbers.holdersOf(state.weight, layout, state.layer, state.expert);
    const experts = layout.ep === 1 ? "" : ep.length === layout.ep ? ", every ep" : `, ep ${ep.join(" and ")}`;
    return `pp ${pp.join(" and ")}${experts}`;
  }

  // The chosen rank is marked where it holds the piece.
  function figure(which, name) {
    const layout = layouts[which];
    const { pp, ep } = numbers.holdersOf(state.weight, layout, state.layer, state.expert);
    const isThere = which === state.which && pp.includes(state.rank.pp) && ep.includes(state.rank.ep);
    const chosen = isThere ? state.rank : null;
    return make("figure", { "data-figure": which },
      make("figcaption", {}, make("b", {}, titles[which]), ` ${sizesInWords(layout)}`, make("br"),
        `on ${holders(layout)}`),
      pictureOf(numbers, state.weight, layout, chosen, `${name} at ${sizesInWords(layout)}`));
  }

  function table(which) {
    const layout = layouts[which];
    const caption = `${titles[which]} ${sizesInWords(layout)}`;
    const size = (part) => bytes(numbers.numelOn(state.weight, layout, part) * data.itemsize);
    return make("table", { class: "table", "data-table": which }, make("caption", { class: "sr" }, caption),
      make("thead", {}, make("tr", {},
        [caption, "slice", "local shape"].map((head) => make("th", { scope: "col" }, head)),
        make("th", { scope: "col", class: "n" }, "bytes"))),
      make("tbody", {}, times(numbers.cutFor(state.weight, layout).boxes.length, (part) => make("tr", {},
        make("td", {}, `${numbers.partName(state.weight, layout)} ${part}, ${holders(layout)}`),
        make("td", {}, numbers.sliceOf(state.weight, layout, part)),
        make("td", {}, shapeOf(numbers.localShape(state.weight, layout, part))),
        make("td", { class: "n" }, size(part))))));
  }

  // The controls: the layout in the map, and the sizes of the planned one

  const tabs = Object.keys(layouts).map((which) => make("button", {
    type: "button", role: "tab", id: `tab-${which}`, "aria-controls": "map", on: { click: () => turnTo(which) },
  }));
  const plan = (label, key, options) => make("label", {}, label, make("select", {
    "data-plan": label, on: { change: (event) => {
      layouts.planned[key] = Number(event.target.value);
      turnTo("planned");
    } },
  }, options.map(([value, text]) => make("option", { value, selected: value === layouts.planned[key] }, text))));

  function turnTo(which) {
    state.which = which;
    const ranks = numbers.ranksOf(shown());
    const alike = (...axes) => ranks.find((each) => axes.every((axis) => each[axis] === state.rank[axis]));
    const rank = alike("tp", "ep", "etp") ?? alike("tp", "ep") ?? alike("ep") ?? ranks.at(-1);
    state.rank = { ...rank, pp: Math.min(state.rank.pp, numbers.pipelineOf(shown()).pp - 1) };
    settle();
    show();
  }

  function show() {
    const etp = document.querySelector('[data-plan="ETP"]');
    if (etp) etp.value = layouts.planned.etp;
    tabs.forEach((tab, number) => {
      const which = Object.keys(layouts)[number];
      tab.setAttribute("aria-selected", String(which === state.which));
      tab.tabIndex = which === state.which ? 0 : -1;
      tab.replaceChildren(`${titles[which]} `, sizesInWords(layouts[which]));
    });
    byId("map").setAttribute("aria-labelledby", `tab-${state.which}`);
    showMap();
    showRank();
    showWeight();
    const listed = Object.keys(layouts).map((which) => ({ title: titles[which], layout: layouts[which] }));
    byId("stacks").replaceChildren(...stacksOf(numbers, listed));
  }

  const list = make("div", { class: "tabs", role: "tablist", "aria-label": "Layout" }, tabs);
  const planned = { class: "choose", role: "group", "aria-label": "The planned layout" };
  byId("layouts").replaceChildren(list, make("div", planned,
    make("span", { class: "small muted" }, "Plan with"),
    plan("TP", "cut", data.cuts.slice(1).map(({ tp }, number) => [number + 1, tp])),
    plan("Pipeline", "pipeline", data.pipelines.map(({ label }, number) => [number, label])),
    numbers.withExperts ? plan("EP", "ep", Object.keys(data.experts).map((ep) => [Number(ep), ep])) : null,
    numbers.withExperts && data.expertTps.length > 1
      ? plan("ETP", "etp", data.expertTps.map((etp) => [etp, etp || "as TP"])) : null));
  moveWith(list, "button", () => 1);
  list.addEventListener("focusin", ({ target }) => {
    if (target.getAttribute("aria-selected") === "false") target.click();
  });
  moveWith(byId("map"), ".tile", () => numbers.pipelineOf(shown()).stages.length);
  show();
}
if (dataOf("data-layouts")) showLayouts(dataOf("data-layouts"));
