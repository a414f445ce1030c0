// The part of each rank of a layout, in numbers and in words. Draws nothing.
//
// A layout is { cut, pipeline, ep, etp }: the index of the cut over tensor-parallel ranks, that of the pipeline, the
// expert-parallel size, and the number of ranks that an expert is cut over (0: as the other weights).
// A rank is { tp, pp, ep, etp }; etp is its part of an expert. A stage is [pp, chunk, first layer, one past the last].
function layoutNumbers(data) {
  const { weights, cuts, expertCuts, pipelines, experts } = data;
  const withExperts = weights.some((weight) => weight.expert);

  const cutOf = (layout) => cuts[layout.cut];
  const pipelineOf = (layout) => pipelines[layout.pipeline];
  const expertsOf = (layout, ep) => experts[layout.ep][ep];
  const stagesOf = (layout, pp) => pipelineOf(layout).stages.filter((stage) => stage[0] === pp);
  const numExperts = withExperts ? sum(Object.values(experts)[0].map(([first, stop]) => stop - first)) : 0;

  // The ends of the model in some stages. A tied model has its embedding again at the output.
  function endsOf(layout, stages) {
    const every = pipelineOf(layout).stages;
    return { embedding: stages.includes(every[0]), output: stages.includes(every.at(-1)) };
  }

  // The layers of some stages that have a weight; layers may differ.
  const layersIn = (weight, stages) =>
    weight.layers.filter((layer) => stages.some(([, , first, stop]) => first <= layer && layer < stop));

  // How many times some stages of a rank hold a weight: once, once per layer, or once per expert of a layer.
  function countIn(weight, layout, stages, ep) {
    const [first, stop] = weight.expert ? expertsOf(layout, ep) : [0, 1];
    if (weight.place === "layer") return layersIn(weight, stages).length * (stop - first);
    const ends = endsOf(layout, stages);
    return Number(ends[weight.place] || (weight.copied && ends.output)) * weight.times * (stop - first);
  }

  const expertTpOf = (layout) => layout.etp || cutOf(layout).tp;
  const isImplied = (layout) => cutOf(layout).tp % expertTpOf(layout) === 0; // a rank's tp says its part of an expert
  const isApart = (layout) => withExperts && expertTpOf(layout) !== cutOf(layout).tp;

  // The cut of a weight: its shape, and the boxes of each part; and the part of a rank.
  const cutFor = (number, layout) =>
    weights[number].expert ? expertCuts[expertTpOf(layout)][number] : cutOf(layout).weights[number];
  const partOf = (number, rank) => (weights[number].expert ? rank.etp : rank.tp);
  const partName = (number, layout) => (weights[number].expert && isApart(layout) ? "etp" : "tp");

  // The ranks of a pipeline stage with a part of their own, in Megatron's order: they enumerate TP, and at the same
  // time the parts of an expert and the experts.
  function ranksOf(layout) {
    const [{ tp }, etp] = [cutOf(layout), expertTpOf(layout)];
    const common = (left, right) => (right ? common(right, left % right) : left);
    const count = (tp * etp * layout.ep) / common(tp, etp * layout.ep);
    const order = ({ etp: part }) => (isImplied(layout) ? 0 : part);
    return times(count, (number) => ({ tp: number % tp, ep: Math.floor(number / etp) % layout.ep, etp: number % etp }))
      .sort((left, right) => left.ep - right.ep || order(left) - order(right) || left.tp - right.tp);
  }

  const boxesOn = (number, layout, part) => cutFor(number, layout).boxes[part];
  const numelOn = (number, layout, part) => sum(boxesOn(number, layout, part).map(([, sizes]) => product(sizes)));

  // Parameters and bytes on a rank in some of its stages; in all of them unless given.
  function sizesOn(layout, rank, stages = stagesOf(layout, rank.pp)) {
    let [every, trained] = [0, 0];
    weights.forEach((weight, number) => {
      const numel = countIn(weight, layout, stages, rank.ep) * numelOn(number, layout, partOf(number, rank));
      every += numel;
      if (weight.trained) trained += numel;
    });
    return { parameters: every, weights: every * data.itemsize, optimizer: trained * data.optimizerBytes };
  }

  // The pipeline ranks and the expert-parallel ranks that hold a weight of one layer and expert.
  function holdersOf(number, layout, layer, expert) {
    const weight = weights[number];
    const pp = times(pipelineOf(layout).pp, (rank) => rank).filter((rank) => {
      const stages = stagesOf(layout, rank);
      return weight.place === "layer" ? layersIn(weight, stages).includes(layer) : countIn(weight, layout, stages, 0);
    });
    const ep = times(layout.ep, (rank) => rank).filter((rank) => {
      const [first, stop] = weight.expert ? expertsOf(layout, rank) : [expert, expert + 1];
      return first <= expert && expert < stop;
    });
    return { pp, ep };
  }

  // In words

  function sizesInWords(layout) {
    const { pp, vpp } = pipelineOf(layout);
    const sizes = [["TP", cutOf(layout).tp], ["PP", pp], ["VPP", vpp], ["EP", layout.ep],
      ["ETP", isApart(layout) ? expertTpOf(layout) : null]];
    return sizes.filter(([name, size]) => size > 1 || name === "TP" || (name === "ETP" && size)).map((size) => size.join(" ")).join(" × ");
  }

  function contentOf(layout, stages) {
    const ends = endsOf(layout, stages);
    const spans = stages.filter(([, , first, stop]) => stop > first).map(([, , first, stop]) => span(first, stop));
    const isOne = spans.length === 1 && !spans[0].includes("–");
    const layers = spans.length ? `layer${isOne ? "" : "s"} ${spans.join(", ")}` : "no layers";
    return [ends.embedding && "embedding", layers, ends.output && "output"].filter(Boolean).join(", ");
  }

  function sliceOf(number, layout, part) {
    const { dim } = weights[number];
    const { shape, boxes: parts } = cutFor(number, layout);
    if (dim === null || parts.length === 1) return "whole";
    const what = shape.length === 1 ? "elements" : dim === 0 ? "rows" : "columns";
    const spans = boxesOn(number, layout, part).map(([at, sizes]) => span(at[dim], at[dim] + sizes[dim]));
    return `${what} ${spans.join(" and ")} of ${shape[dim].toLocaleString("en")}`;
  }

  // The shape of a part of a weight: its boxes behind one another.
  function localShape(number, layout, part) {
    const boxes = boxesOn(number, layout, part);
    const { dim } = weights[number];
    return boxes[0][1].map((size, axis) => (axis === dim ? sum(boxes.map(([, sizes]) => sizes[dim])) : size));
  }

  function howCut({ dim, parts, shape }) {
    if (dim === null) return "not cut: every tensor-parallel rank has all of it";
    if (shape.length === 1) return "cut in equal pieces";
    if (parts > 1) return `cut in rows, each of its ${parts} parts on its own`;
    return dim === 0 ? "cut in rows (column parallel)" : "cut in columns (row parallel)";
  }

  const rankName = (layout, { tp, pp, ep, etp }) => [`tp ${tp} · pp ${pp}`, withExperts && `ep ${ep}`,
    withExperts && !isImplied(layout) && `etp ${etp}`].filter(Boolean).join(" · ");
  const shortName = (weight) => weight.name.replace("decoder.layers.{layer}.", "").replace("{expert}", "*");

  return {
    data, weights, withExperts, numExperts, cutOf, cutFor, partOf, partName,
    expertTpOf, isApart, ranksOf, pipelineOf, expertsOf, stagesOf, endsOf, layersIn, countIn, boxesOn,
    numelOn,
    sizesOn, holdersOf, sizesInWords, contentOf, sliceOf, localShape, howCut, rankName, shortName,
  };
}
