// Values of the loss curve at the pointer; the curve itself is already drawn.
function readCurve(data) {
  const plot = byId("plot");
  const cross = make("div", { class: "cross", hidden: true });
  plot.append(cross);
  const [first, last] = [data.read[0][0], data.read.at(-1)[0]];
  let at = data.read.length - 1;

  function show(number) {
    at = Math.min(data.read.length - 1, Math.max(0, number));
    const [iteration, loss, smooth] = data.read[at];
    cross.hidden = false;
    cross.style.left = `${last > first ? (100 * (iteration - first)) / (last - first) : 0}%`;
    byId("curve-read").replaceChildren(make("b", {}, `iteration ${iteration.toLocaleString("en")}`),
      ` loss ${digits(loss, 5)}`, smooth === null ? "" : ` · smoothed ${digits(smooth, 5)}`);
  }
  function nearest(event) {
    const box = plot.getBoundingClientRect();
    const wanted = first + ((event.clientX - box.left) / box.width) * (last - first);
    const gaps = data.read.map(([iteration]) => Math.abs(iteration - wanted));
    show(gaps.indexOf(Math.min(...gaps)));
  }
  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at + step);
  });
}
if (dataOf("data-curve")) readCurve(dataOf("data-curve"));
