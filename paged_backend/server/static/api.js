// The server, as the page sees it: requests with the key, and answers that stream.

const KEY = "paged-backend-key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// Called when the server wants a key; returns once there is a new one, or throws.
let askForKey = async () => {
  throw new ApiError(401, "this server wants an API key");
};

export function onKeyWanted(ask) {
  askForKey = ask;
}

// The response to a request; asks for a key as long as there is no valid one. Other failures are thrown.
export async function send(path, { body, signal } = {}) {
  for (;;) {
    const used = key.get();
    const headers = used === null ? {} : { Authorization: `Bearer ${used}` };
    const options = { headers, signal };
    if (body !== undefined) {
      headers["Content-Type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(path, options);
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    await askForKey(used);
  }
}

export async function getJSON(path) {
  return (await send(path)).json();
}

// The events of a stream, as objects; throws the error that ends it.
export async function* stream(path, body, signal) {
  const response = await send(path, { body, signal });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error.message, event.error.code);
    yield event;
  }
  throw new ApiError(response.status, "the connection ended before the answer did");
}

async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function failure(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.message, error.code);
  } catch {
    return new ApiError(response.status, `the server answered with status ${response.status}`);
  }
}
