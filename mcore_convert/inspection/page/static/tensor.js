// Pictures of a tensor as a rectangle, with the boxes of its ranks.
const MOST_RATIO = 1.5; // of width to height, or the other way round: longer tensors are not drawn to scale
const PICTURE = { width: 250, height: 200, top: 16, gutter: 14, strip: 9, bar: 30 };

function fitted([rows, columns], mostWidth, mostHeight) {
  const ratio = Math.min(MOST_RATIO, Math.max(1 / MOST_RATIO, columns / rows));
  return ratio > mostWidth / mostHeight ? [mostWidth, mostWidth / ratio] : [mostHeight * ratio, mostHeight];
}

// The position of a box of a tensor in its picture. A vector is drawn horizontally.
function placed([offsets, sizes], shape, { left, top, width, height }) {
  const axes = [0, 1].map((dim) => [offsets[dim], sizes[dim], shape[dim]]);
  const [y, x] = shape.length === 1 ? [[0, 1, 1], axes[0]] : axes;
  return {
    x: left + (width * x[0]) / x[2], y: top + (height * y[0]) / y[2],
    width: (width * x[1]) / x[2], height: (height * y[1]) / y[2],
  };
}

function thumbOf(numbers, number, layout, rank) {
  const { shape } = numbers.cutFor(number, layout);
  const [width, height] = shape.length === 1 ? [30, 8] : fitted(shape, 30, 30);
  const frame = { left: 1, top: 1, width, height };
  return draw("svg", { class: `thumb c${rank.tp % 8}`, width: width + 2, height: height + 2, "aria-hidden": "true" },
    draw("rect", { class: "frame", x: 1, y: 1, width, height }),
    numbers.boxesOn(number, layout, numbers.partOf(number, rank)).map((box) => draw("rect", { class: "mine", ...placed(box, shape, frame) })));
}

// The whole tensor with the box of each rank. `chosen` is the rank whose part is marked, or null.
function pictureOf(numbers, number, layout, chosen, title) {
  const weight = numbers.weights[number];
  const { shape, boxes: parts } = numbers.cutFor(number, layout);
  const tp = parts.length;
  const axis = numbers.partName(number, layout);
  const isFlat = shape.length === 1;
  const left = weight.bands.length && !isFlat ? PICTURE.gutter : 0;
  const [width, height] = isFlat ? [PICTURE.width, PICTURE.bar] : fitted(shape, PICTURE.width - left, PICTURE.height);
  const frame = { left, top: PICTURE.top, width, height };
  const bottom = frame.top + height;
  const isWhole = weight.dim === null || tp === 1;
  const padded = weight.vocab ? shape[0] - weight.shape[0] : 0;

  const boxOf = (rank, box) => {
    const at = placed(box, shape, frame);
    const label = isWhole && tp > 1 ? `every ${axis} rank` : `${axis} ${rank}`;
    const fits = at.height >= 13 && at.width >= 6.4 * label.length;
    const kind = isWhole ? "whole" : chosen !== null && rank === numbers.partOf(number, chosen) ? "box mine" : "box";
    return draw("g", {
      class: isWhole && tp > 1 ? "" : `c${rank % 8}`,
      "data-tp": rank, "data-offsets": box[0].join(), "data-sizes": box[1].join(),
    }, draw("title", {}, `${label}: ${numbers.sliceOf(number, layout, rank)}`), draw("rect", { class: kind, ...at }),
    fits ? draw("text", {
      x: at.x + at.width / 2, y: at.y + at.height / 2 + 4, "text-anchor": "middle",
    }, label) : null);
  };
  const boxes = isWhole ? [boxOf(0, [shape.map(() => 0), shape])]
    : times(tp, (rank) => numbers.boxesOn(number, layout, rank).map((box) => boxOf(rank, box)));
  const padding = padded ? draw("rect", {
    class: "padding", ...placed([[weight.shape[0], 0], [padded, shape[1]]], shape, frame),
  }, draw("title", {}, `${padded} rows of padding`)) : null;
  const bands = weight.bands.map(([tensor, first, count]) => {
    const at = placed(isFlat ? [[first], [count]] : [[first, 0], [count, 1]], shape, frame);
    const where = isFlat ? { x: at.x, y: bottom + 3, width: at.width, height: 7 }
      : { x: 0, y: at.y, width: PICTURE.strip, height: at.height };
    return draw("rect", { class: `band${tensor % 4}`, ...where });
  });
  const line = (y, text) => draw("text", { class: "axis", x: left, y }, text);
  const ofPadding = padded ? `, ${padded.toLocaleString("en")} of them padding` : "";
  const rows = `${shape[0].toLocaleString("en")} rows${ofPadding}`;
  const axes = isFlat ? [line(11, `${shape[0].toLocaleString("en")} elements`)]
    : [line(11, `${shape[1].toLocaleString("en")} columns`), line(bottom + 14, rows)];
  return draw("svg", {
    class: "tensor", viewBox: `0 0 ${PICTURE.width} ${bottom + 20}`, role: "img",
    "aria-label": `${title}: ${times(tp, (rank) => `${axis} ${rank} ${numbers.sliceOf(number, layout, rank)}`).join("; ")}`,
  }, draw("defs", {}, draw("pattern", {
    id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
  }, draw("rect", { width: 1.2, height: 5, fill: "var(--hatch)" }))), boxes, padding, bands, axes);
}
