// The map of ranks, the content of the chosen one, and the bytes on each.

// A column per stage in the order of the forward pass, a row per rank that shares it.
function mapOfRanks(numbers, layout, chosen, choose) {
  const { ranksOf, pipelineOf, contentOf, sizesOn, rankName, withExperts } = numbers;
  const { stages, vpp } = pipelineOf(layout);
  const ranks = ranksOf(layout);
  const side = !withExperts ? 62 : numbers.isApart(layout) ? 140 : 112;
  const columns = stages.map(([, , first, stop]) => `minmax(84px, ${Math.max(1, stop - first)}fr)`).join(" ");

  const heads = stages.map((stage) => make("div", { class: "head", role: "columnheader" },
    make("b", {}, `pp ${stage[0]}`), vpp > 1 ? ` · chunk ${stage[1]}` : "", make("br"), contentOf(layout, [stage])));
  const tile = (rank, stage) => {
    const isChosen = ["tp", "pp", "ep", "etp"].every((axis) => rank[axis] === chosen[axis]);
    const size = bytes(sizesOn(layout, rank, [stage]).weights);
    return make("div", { role: "cell" }, make("button", {
      type: "button", class: `tile c${rank.tp % 8}`, tabindex: -1, "aria-pressed": String(isChosen),
      "data-rank": `${rank.tp},${rank.pp},${rank.ep}`, "data-etp": rank.etp, "data-chunk": stage[1],
      "aria-label": `rank ${rankName(layout, rank)}: ${contentOf(layout, [stage])}, ${size}`,
      on: { click: () => choose(rank, stage[1]) },
    }, size));
  };
  const rows = ranks.map(({ tp, ep, etp }) => make("div", { role: "row" },
    make("div", { class: "head side", role: "rowheader" }, make("span", { class: `chip c${tp % 8}` }),
      make("b", {}, `tp ${tp}`), withExperts ? [
        ` · ep ${ep}`, numbers.isApart(layout) ? ` · etp ${etp}` : null, make("br"),
        `experts ${span(...numbers.expertsOf(layout, ep))}`] : null),
    stages.map((stage) => tile({ tp, pp: stage[0], ep, etp }, stage))));
  return make("div", {
    class: `map ${ranks.length <= 2 ? "few" : ranks.length > 12 ? "many" : ""}`, role: "table",
    style: `--columns:${side}px ${columns}; min-width:${side + 88 * stages.length}px`,
    "aria-label": `Ranks of ${numbers.sizesInWords(layout)}: stages from left to right, their ranks below one another`,
  }, make("div", { role: "row" }, make("div", { role: "cell" }), heads), rows);
}

// Every weight that a rank holds, as buttons that choose it.
function contentOfRank(numbers, layout, rank, chosenWeight, choose) {
  const { weights, data, stagesOf, countIn, numelOn, sliceOf, localShape, shortName, endsOf } = numbers;
  const stages = stagesOf(layout, rank.pp);
  const sizes = numbers.sizesOn(layout, rank);
  const line = (weight, number) => {
    const count = countIn(weight, layout, stages, rank.ep);
    if (!count) return null;
    const part = numbers.partOf(number, rank);
    const isCopy = weight.copied && !endsOf(layout, stages).embedding;
    return make("li", {}, make("button", {
      type: "button", "aria-pressed": String(number === chosenWeight), "data-weight": weight.name,
      on: { click: () => choose(number) },
    }, thumbOf(numbers, number, layout, rank),
    make("span", {}, make("code", { class: "name" }, named(shortName(weight))), make("span", { class: "what" },
      `${sliceOf(number, layout, part)} · ${shapeOf(localShape(number, layout, part))}`,
      isCopy ? " · the tied output" : "")),
    make("span", { class: "bytes" }, bytes(count * numelOn(number, layout, part) * data.itemsize),
      count > 1 ? make("span", { class: "what" }, `in ${count}`) : null)));
  };
  return [
    make("h3", {}, make("span", { class: `chip c${rank.tp % 8}` }), `Rank ${numbers.rankName(layout, rank)}`),
    make("p", { class: "sums" }, make("span", {}, numbers.contentOf(layout, stages)),
      make("span", {}, make("b", {}, bytes(sizes.weights)), " of weights"),
      make("span", {}, make("b", {}, sizes.parameters.toLocaleString("en")), " parameters")),
    make("ul", { class: "holds" }, weights.map(line)),
  ];
}

// A bar per pipeline rank, on a scale per layout: weights, then optimizer state.
function stacksOf(numbers, layouts) {
  const { data, pipelineOf, stagesOf, sizesOn, contentOf, sizesInWords } = numbers;
  const listed = layouts.map(({ title, layout }) => ({
    title, layout, rows: times(pipelineOf(layout).pp, (pp) => ({ pp, ...sizesOn(layout, { tp: 0, pp, ep: 0, etp: 0 }) })),
  }));
  const totalOf = (row) => row.weights + row.optimizer;
  return listed.map(({ title, layout, rows }) => {
    const most = Math.max(...rows.map(totalOf));
    const part = (kind, size) => make("span", { class: kind, style: `width:${(100 * size) / most}%` });
    const mean = sum(rows.map(totalOf)) / rows.length;
    const count = numbers.ranksOf(layout).length;
    const bar = (row) => {
      const isUneven = totalOf(row) === most && most > 1.02 * mean;
      return make("li", { class: "stack", "data-pp": row.pp },
        make("span", {}, make("b", {}, `pp ${row.pp}`),
          make("span", { class: "muted" }, ` ${contentOf(layout, stagesOf(layout, row.pp))}`)),
        make("span", { class: "track", "aria-hidden": "true" }, part("weights", row.weights),
          part(data.optimizerKnown ? "optimizer" : "assumed", row.optimizer)),
        make("span", { class: "total" }, make("b", {}, bytes(totalOf(row))), make("span", { class: "muted" },
          isUneven ? `, ${digits(most / mean)} × the mean` : "", make("br"),
          `${bytes(row.weights)} + ${bytes(row.optimizer)}`)));
    };
    return make("div", {}, make("h3", {}, `${title} `, make("span", { class: "muted" }, sizesInWords(layout))),
      make("p", { class: "small muted" },
        count > 1 ? `Each of the ${count} ranks of a stage holds` : "Each rank holds"),
      make("ul", { class: "stacks" }, rows.map(bar)));
  });
}
