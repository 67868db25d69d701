// The form's sampling controls, tools and schema as fields of a request.

import { byId, setText } from "./elements.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "n"];

// The fields that are filled in, or null if one is wrong; then it says so, and has the focus.
export function readOptions() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = byId(name);
    if (!input.checkValidity()) {
      byId("options").open = true;
      input.reportValidity();
      return null;
    }
    if (input.value !== "") fields[name] = Number(input.value);
  }
  const tools = readJSON("tools", Array.isArray, "a JSON list of tools");
  const schema = readJSON("schema", (value) => typeof value === "object" && value !== null, "a JSON object");
  if (tools === null || schema === null) return null;
  if (tools) {
    fields.tools = tools;
    if (byId("tool_choice").value) fields.tool_choice = byId("tool_choice").value;
  }
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return fields;
}

export const systemPrompt = () => byId("system").value.trim();

// The value, undefined if there is none, null if it is wrong.
function readJSON(id, isRight, expected) {
  const input = byId(id);
  const text = input.value.trim();
  let message = "";
  let value;
  if (text) {
    try {
      value = JSON.parse(text);
      if (!isRight(value)) message = `This has to be ${expected}.`;
    } catch (error) {
      message = `This is no JSON: ${error.message}`;
    }
  }
  setText(byId(`${id}-error`), message);
  input.setAttribute("aria-invalid", String(message !== ""));
  if (!message) return value;
  byId("options").open = true;
  input.focus();
  return null;
}
