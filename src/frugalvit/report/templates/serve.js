"use strict";
(() => {
  const get = name => document.getElementById(name);
  const drop = get("drop"), state = get("state"), answer = get("answer");
  const limit = Number(get("photo").dataset.limit);
  const percent = share => `${(100 * share).toFixed(1)} %`;

  // All texts come from files, so they are only ever set as text.
  function add(parent, tag, text, attributes = {}) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  }

  function part(identity, title) {
    const section = add(answer, "section", undefined, { id: identity });
    add(section, "h2", title);
    return section;
  }

  function show(found) {
    answer.replaceChildren();
    const verdict = part("verdict", "Answer");
    const table = add(verdict, "table", undefined, { class: "bars" });
    for (const guess of found.predictions) {
      const row = add(table, "tr");
      add(row, "th", guess.class, { scope: "row" });
      const share = add(add(row, "td", undefined, { class: "meter" }), "i");
      share.style.setProperty("--share", guess.probability.toFixed(3));
      add(row, "td", percent(guess.probability), { class: "number" });
    }
    const asked = `${Math.round(100 * found.coverage)} %`;
    add(verdict, "p", !found.set ? "The model is not calibrated: do not read these numbers as probabilities."
      : found.set.length ? `In ${asked} of cases the right class is among: ${found.set.join(", ")}.`
      : `No class is sure enough for a coverage of ${asked}: ask a person.`, { id: "set" });
    if (found.unlike_training)
      add(add(verdict, "ul", undefined, { class: "alarms" }), "li",
        "This photo is unlike the training images: do not trust the answer.", { id: "unlike" });
    const map = part("map", "What it looks at");
    add(map, "p", `Yellow: high ${found.map.shows}.`, { class: "lead" });
    add(map, "img", undefined, { src: found.map.image, alt: found.map.shows });
    if (!found.nearest.length) return;
    const gallery = add(part("nearest", "Nearest training images"), "div", undefined, { class: "gallery" });
    for (const image of found.nearest) {
      const figure = add(gallery, "figure");
      if (image.image) add(figure, "img", undefined, { src: image.image, alt: "" });
      const caption = add(figure, "figcaption");
      add(caption, "b", image.class);
      add(caption, "div", `${image.similarity.toFixed(2)} · ${image.name}`, { class: "quiet" });
    }
  }

  async function send(file) {
    if (!file) return;
    answer.replaceChildren();
    state.textContent = file.size > limit ? `This file is larger than ${limit / 1e6} MB.` : "…";
    if (file.size > limit) return;
    try {
      const response = await fetch("/predict", { method: "POST", body: file });
      const found = await response.json();
      state.textContent = found.error ? `Refused: ${found.error}` : "";
      if (!found.error) show(found);
    } catch {
      state.textContent = "The server did not answer.";
    }
  }

  get("file").addEventListener("change", event => send(event.target.files[0]));
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, event => event.preventDefault());
  document.addEventListener("dragover", () => drop.classList.add("over"));
  document.addEventListener("drop", event => {
    drop.classList.remove("over");
    send(event.dataTransfer.files[0]);
  });
})();
