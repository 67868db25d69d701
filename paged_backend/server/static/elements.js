// Small helpers for the page's elements. Text only ever enters as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, { className, text, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Changes the page only where it says something else: what a screen reader or a selection points at stays.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const NUMBER = new Intl.NumberFormat("en");
export const count = (value) => NUMBER.format(value);
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
