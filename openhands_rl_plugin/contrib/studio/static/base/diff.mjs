// Differences of two texts by lines, and of two lists of anything that === compares.
const MOST = 1500;

/** [[" " | "-" | "+", item], ...]: what stays, goes and comes. */
export function diff(before, after) {
  let head = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head += 1;
  let tail = 0;
  while (tail < before.length - head && tail < after.length - head && before.at(-1 - tail) === after.at(-1 - tail)) tail += 1;
  const a = before.slice(head, before.length - tail);
  const b = after.slice(head, after.length - tail);
  const middle = a.length * b.length > MOST * MOST ? [...a.map((each) => ['-', each]), ...b.map((each) => ['+', each])] : longest(a, b);
  return [...before.slice(0, head).map((each) => [' ', each]), ...middle, ...before.slice(before.length - tail).map((each) => [' ', each])];
}

function longest(a, b) {
  const width = b.length + 1;
  const table = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const steps = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { steps.push([' ', a[i]]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) { steps.push(['-', a[i]]); i += 1; }
    else { steps.push(['+', b[j]]); j += 1; }
  }
  return steps;
}

/** Lines with at most `around` unchanged ones about each change; `['…', n]` stands for n that are left out. */
export function hunks(steps, around = 3) {
  const near = new Set();
  steps.forEach(([sign], at) => { if (sign !== ' ') for (let n = at - around; n <= at + around; n += 1) near.add(n); });
  const shown = [];
  let skipped = 0;
  steps.forEach((step, at) => {
    if (near.has(at)) {
      if (skipped) shown.push(['…', skipped]);
      skipped = 0;
      shown.push(step);
    } else skipped += 1;
  });
  if (skipped) shown.push(['…', skipped]);
  return shown;
}
