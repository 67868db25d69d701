// Puts the page together.

import { getJSON } from "./api.js";
import { startChat } from "./chat.js";
import { startCrowd } from "./crowd.js";
import { byId, make } from "./elements.js";
import { watchKey } from "./key_dialog.js";
import { startWatching } from "./watch.js";

const RETRY_MILLISECONDS = 2000;
const model = () => byId("model").value || undefined;

watchKey();
startChat(model);
startCrowd(model);
startWatching(model);
listModels();

async function listModels() {
  try {
    const { data } = await getJSON("v1/models");
    byId("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, text: id })));
  } catch (error) {
    if (error.code !== "no_key") setTimeout(listModels, RETRY_MILLISECONDS); // it is still being loaded
  }
}
