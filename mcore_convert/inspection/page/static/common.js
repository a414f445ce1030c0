// Functions for all parts of a page: creating elements, and formatting numbers.
const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);
const dataOf = (id) => (byId(id) ? JSON.parse(byId(id).textContent) : null);
const product = (sizes) => sizes.reduce((left, right) => left * right, 1);
const sum = (values) => values.reduce((left, right) => left + right, 0);
const times = (count, make) => Array.from({ length: count }, (_, number) => make(number));

function digits(value, count = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(count - 1).replace("e+", "e").replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(count)));
}

function percent(share) {
  if (share === null || share === undefined) return "–";
  const text = digits(100 * share);
  return `${text === "100" && share < 1 ? ">99.9" : text} %`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (count >= 999.5 && power < units.length - 1) [count, power] = [count / 1000, power + 1];
  return `${power ? Number(count.toPrecision(3)) : Math.round(count)} ${units[power]}`;
}

const written = { number: digits, percent, count: (value) => (value === null ? "–" : value.toLocaleString("en")) };
// A long name that may break after a dot, an underscore or a slash.
const named = (text) => text.split(/(?<=[._/])/).map((part, number) => (number ? [make("wbr"), part] : part));
const shapeOf = (sizes) => (sizes.length ? sizes.map((size) => size.toLocaleString("en")).join(" × ") : "one number");
const span = (first, stop) => (stop - first === 1 ? `${first}` : `${first}–${stop - 1}`);

// Arrow keys move within a group that is a single tab stop.
function moveWith(container, selector, columns) {
  container.addEventListener("keydown", (event) => {
    const items = [...container.querySelectorAll(selector)];
    const at = items.indexOf(document.activeElement);
    const width = columns();
    const target = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + width, ArrowUp: at - width, Home: 0, End: items.length - 1,
    }[event.key];
    if (at < 0 || target === undefined) return;
    event.preventDefault();
    if (!items[target]) return;
    items[at].tabIndex = -1;
    items[target].tabIndex = 0;
    items[target].focus();
  });
}

byId("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  const chosen = isDark ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try { localStorage.setItem("mcore-convert-theme", chosen); } catch { /* a page without storage forgets */ }
});
