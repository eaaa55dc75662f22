// Requests to this server: JSON in, errors as messages a person can read.

let token = sessionStorage.getItem("token") || "";

export function setToken(text) {
  token = text;
  sessionStorage.setItem("token", text);
}

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

async function request(path, options, retries) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: token ? { Authorization: `Bearer ${token}` } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer.");
  }
  if (response.status === 429 && retries > 0) {
    await sleep(Number(response.headers.get("retry-after")) || 1);
    return request(path, options, retries - 1);
  }
  const answer = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new ServerError(response.status, answer.error);
  return answer;
}

export const get = (path) => request(path, {}, 3);

export function post(path, query, body, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  return request(`${path}?${new URLSearchParams(given)}`, { method: "POST", body, signal }, 3);
}
