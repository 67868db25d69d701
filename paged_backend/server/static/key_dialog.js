// Asks for the API key, once for all requests that want it.

import { ApiError, key, onKeyWanted } from "./api.js";
import { byId, setText } from "./elements.js";

const dialog = byId("key-dialog");
const field = byId("key");
const button = byId("key-button");
let asking = null;
let isDeclined = false;

export function watchKey() {
  onKeyWanted(ask);
  byId("key-form").addEventListener("submit", () => key.set(field.value.trim()));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  button.addEventListener("click", () => {
    key.forget();
    location.reload();
  });
  showButton();
}

function ask(refused) {
  if (asking === null && key.get() !== refused) return Promise.resolve(); // somebody has given one meanwhile
  asking ??= open(refused).finally(() => {
    asking = null;
    isDeclined = key.get() === null;
    showButton();
  });
  return asking;
}

function open(refused) {
  key.forget();
  field.value = "";
  setText(byId("key-error"), refused === null ? "" : "That key is not known here.");
  field.setAttribute("aria-invalid", String(refused !== null));
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener(
      "close",
      () => (key.get() === null ? reject(new ApiError(401, "This server wants an API key.", "no_key")) : resolve()),
      { once: true },
    );
  });
}

function showButton() {
  button.hidden = key.get() === null && !isDeclined;
  setText(button, key.get() === null ? "Enter key" : "Forget key");
}
