"use strict";
(() => {
  const get = name => document.getElementById(name);
  const limit = Number(get("photo").dataset.limit);

  async function send(file) {
    if (!file) return;
    get("answer").replaceChildren();
    get("state").textContent = file.size > limit ? `This file is larger than ${limit / 1e6} MB.` : "…";
    if (file.size > limit) return;
    try {
      const response = await fetch("/answer", { method: "POST", body: file });
      const text = await response.text();
      get("state").textContent = response.ok ? "" : `Refused: ${JSON.parse(text).error}`;
      if (response.ok) get("answer").innerHTML = text; // the server escapes all names
    } catch {
      get("state").textContent = "The server did not answer.";
    }
  }

  get("file").addEventListener("change", event => send(event.target.files[0]));
  document.addEventListener("dragover", event => event.preventDefault());
  document.addEventListener("drop", event => {
    event.preventDefault();
    send(event.dataTransfer.files[0]);
  });
})();
