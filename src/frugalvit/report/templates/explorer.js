"use strict";
// The explorer: everything is drawn relative to one chosen region.
(() => {
  const HEAT = Uint8Array.from(atob("{{heat}}"), character => character.charCodeAt(0));
  const bytes = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const floats = text => new Float32Array(bytes(text).buffer);
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const drawing = (name, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };

  class Explorer {
    constructor(root) {
      this.root = root;
      this.data = JSON.parse(root.querySelector("script").textContent);
      this.models = this.data.models.map(model => ({...model, cache: {}}));
      this.state = {model: 0, shown: [0, Math.min(1, this.data.images.length - 1)], pane: 0, region: 0, head: null,
        pinned: false, lines: false};
      const grid = this.model.grid;
      this.state.region = Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
      this.build();
      Promise.all(this.data.images.map(image => this.load(image))).then(() => {
        this.fromAddress();
        addEventListener("hashchange", () => this.fromAddress());
        addEventListener("resize", () => this.draw());
        this.draw();
        root.dataset.ready = "yes";
      });
    }

    get model() { return this.models[this.state.model]; }

    get isCoarse() { return Math.max(...this.model.grid) <= 16; }

    async load(image) {
      const picture = new Image();
      picture.src = image.src;
      await picture.decode();
      image.picture = picture;
      // The heat map is drawn over a grey picture.
      const grey = element("canvas", {width: image.width, height: image.height}), context = grey.getContext("2d");
      context.drawImage(picture, 0, 0, image.width, image.height);
      const pixels = context.getImageData(0, 0, image.width, image.height);
      for (let i = 0; i < pixels.data.length; i += 4) {
        const light = 0.299 * pixels.data[i] + 0.587 * pixels.data[i + 1] + 0.114 * pixels.data[i + 2];
        pixels.data[i] = pixels.data[i + 1] = pixels.data[i + 2] = light;
      }
      context.putImageData(pixels, 0, 0);
      image.grey = grey;
    }

    build() {
      const {root, data} = this;
      const controls = element("div", {className: "controls"});
      if (this.models.length > 1) {
        this.chooser = element("select", {id: "explorer-model"});
        this.models.forEach((model, index) => this.chooser.append(element("option", {value: index, textContent: model.name})));
        this.chooser.addEventListener("change", () => this.switchModel(+this.chooser.value));
        controls.append(element("label", {htmlFor: "explorer-model", textContent: "Model"}), this.chooser);
      }
      this.linesButton = element("button", {type: "button", textContent: "Best 10 pairs"});
      this.linesButton.addEventListener("click", () => { this.state.lines = !this.state.lines; this.draw(); });
      this.ramp = element("canvas", {width: 256, height: 1});
      this.low = element("span");
      this.high = element("span");
      controls.append(this.linesButton, element("span", {className: "scale"}, "similarity", this.low, this.ramp, this.high));
      const ramp = this.ramp.getContext("2d"), pixels = ramp.createImageData(256, 1);
      for (let i = 0; i < 256; i++) pixels.data.set([HEAT[3 * i], HEAT[3 * i + 1], HEAT[3 * i + 2], 255], 4 * i);
      ramp.putImageData(pixels, 0, 0);

      this.stage = element("div", {className: "stage"});
      this.panes = [0, 1].map(index => this.buildPane(index));
      this.overlay = drawing("svg", {class: "lines", "aria-hidden": "true"});
      this.stage.append(...this.panes.map(pane => pane.figure), this.overlay);
      this.readout = element("p", {className: "readout"});
      this.readout.setAttribute("aria-live", "polite");
      this.heads = element("div", {className: "heads"});
      this.notes = element("p", {className: "quiet"});
      const keys = element("p", {className: "keys"});
      keys.innerHTML = "<kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd> move, <kbd>Enter</kbd> or click pins the " +
        "region, <kbd>Tab</kbd> goes to the other image, <kbd>,</kbd> <kbd>.</kbd> switch the image, <kbd>[</kbd> <kbd>]</kbd> the head, " +
        "<kbd>m</kbd> the model, <kbd>l</kbd> the pairs.";
      root.append(controls, this.stage, this.readout, this.heads, this.notes, keys);
      if (data.images.length < 2) this.linesButton.hidden = true;
    }

    buildPane(index) {
      const canvas = element("canvas", {tabIndex: 0}), name = element("p", {className: "name"});
      canvas.setAttribute("role", "img");
      const thumbs = element("div", {className: "thumbs"});
      this.data.images.forEach((image, which) => {
        const picture = element("img", {src: image.src, alt: image.name});
        const button = element("button", {type: "button", title: image.name}, picture);
        button.addEventListener("click", () => { this.state.shown[index] = which; this.draw(); });
        thumbs.append(button);
      });
      const figure = element("figure", {className: "pane"}, canvas, name);
      if (this.data.images.length > 2) figure.append(thumbs);
      const choose = event => {
        const box = canvas.getBoundingClientRect();
        this.choose(index, this.regionAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height));
      };
      canvas.addEventListener("pointermove", event => { if (!this.state.pinned || event.buttons) choose(event); });
      canvas.addEventListener("pointerdown", event => {
        if (event.pointerType === "mouse") this.state.pinned = !this.state.pinned;
        choose(event);
      });
      canvas.addEventListener("focus", () => {
        if (canvas.matches(":focus-visible") && this.state.pane !== index) this.choose(index, this.state.region);
      });
      canvas.addEventListener("keydown", event => this.key(event, index));
      return {figure, canvas, name, thumbs};
    }

    key(event, pane) {
      const {state} = this, [rows, columns] = this.model.grid;
      let row = Math.floor(state.region / columns), column = state.region % columns;
      const heads = this.headOrder(), images = this.data.images.length;
      const turn = step => {
        const index = heads.indexOf(state.head);
        state.head = index < 0 ? heads[step > 0 ? 0 : heads.length - 1] : heads[index + step] ?? null;
      };
      const actions = {
        ArrowLeft: () => { column = Math.max(0, column - 1); },
        ArrowRight: () => { column = Math.min(columns - 1, column + 1); },
        ArrowUp: () => { row = Math.max(0, row - 1); },
        ArrowDown: () => { row = Math.min(rows - 1, row + 1); },
        Home: () => { column = 0; },
        End: () => { column = columns - 1; },
        Enter: () => { state.pinned = !state.pinned; },
        ",": () => { state.shown[pane] = (state.shown[pane] + images - 1) % images; },
        ".": () => { state.shown[pane] = (state.shown[pane] + 1) % images; },
        "[": () => turn(-1),
        "]": () => turn(1),
        m: () => this.switchModel((state.model + 1) % this.models.length),
        l: () => { state.lines = !state.lines; },
      };
      if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      actions[event.key]();
      this.choose(pane, event.key === "m" ? state.region : row * columns + column);
    }

    switchModel(index) {
      const [across, down] = this.centre(this.state.region);
      this.state.model = index;
      this.state.head = null;
      if (this.chooser) this.chooser.value = index;
      this.state.region = this.regionAt(across, down);
      this.draw();
    }

    // Positions are shares of the picture's width and height. The grid of a padded picture is larger than it: its
    // last regions are cut.
    box(region) {
      const {grid: [rows, columns], extent: [tall, wide]} = this.model;
      const row = Math.floor(region / columns), column = region % columns;
      const [left, right] = [column, column + 1].map(edge => Math.min(1, edge * wide / columns));
      const [top, bottom] = [row, row + 1].map(edge => Math.min(1, edge * tall / rows));
      return [left, top, right - left, bottom - top];
    }

    centre(region) {
      const [left, top, width, height] = this.box(region);
      return [left + width / 2, top + height / 2];
    }

    regionAt(across, down) {
      const {grid: [rows, columns], extent: [tall, wide]} = this.model;
      const index = (share, extent, count) => Math.min(count - 1, Math.max(0, Math.floor(share / extent * count)));
      return index(down, tall, rows) * columns + index(across, wide, columns);
    }

    choose(pane, region) {
      this.state.pane = pane;
      this.state.region = region;
      this.draw();
    }

    // #explorer=0,3,4 chooses row 3, column 4 of the first pane: a link to a region.
    fromAddress() {
      const match = /explorer=([01]),(\d+),(\d+)/.exec(location.hash);
      if (!match) return;
      const [rows, columns] = this.model.grid, [pane, row, column] = match.slice(1).map(Number);
      if (row < rows && column < columns) this.choose(pane, row * columns + column);
    }

    // Similarities of one region of image i to all of image j: bytes and their scale.
    similarity(i, j, region) {
      const key = `${Math.min(i, j)}-${Math.max(i, j)}`, stored = this.model.similarity[key];
      const table = this.model.cache[key] ??= bytes(stored.data);
      const tokens = this.model.grid[0] * this.model.grid[1], levels = new Uint8Array(tokens);
      for (let other = 0; other < tokens; other++)
        levels[other] = i <= j ? table[region * tokens + other] : table[other * tokens + region];
      return {levels, value: level => stored.low + level / 255 * (stored.high - stored.low), low: stored.low, high: stored.high};
    }

    attention(image) {
      const stored = this.model.heads[image];
      if (!stored) return null;
      return this.model.cache[`heads ${image}`] ??= {
        count: stored.count, weights: bytes(stored.weights), peak: floats(stored.peak), entropy: floats(stored.entropy)};
    }

    // Most focused first, by the mean over all regions, so that the order does not change with the region.
    headOrder() {
      const seen = this.attention(this.state.shown[this.state.pane]);
      if (!seen) return [];
      if (!seen.order) {
        const tokens = this.model.grid[0] * this.model.grid[1];
        const total = [...Array(seen.count).keys()].map(head =>
          seen.entropy.subarray(head * tokens, (head + 1) * tokens).reduce((sum, bits) => sum + bits, 0));
        seen.order = [...total.keys()].sort((a, b) => total[a] - total[b] || a - b);
      }
      return seen.order;
    }

    headLevels(seen, head) {
      const tokens = this.model.grid[0] * this.model.grid[1], start = (head * tokens + this.state.region) * tokens;
      return seen.weights.subarray(start, start + tokens);
    }

    heat(context, levels, width, height, low = 0, high = 255) {
      const {grid: [rows, columns], extent: [tall, wide]} = this.model;
      this.patch ??= element("canvas");
      this.patch.width = columns;
      this.patch.height = rows;
      const patch = this.patch.getContext("2d"), pixels = patch.createImageData(columns, rows);
      for (let i = 0; i < levels.length; i++) {
        const level = high > low ? Math.round(255 * (levels[i] - low) / (high - low)) : 0;
        pixels.data.set([HEAT[3 * level], HEAT[3 * level + 1], HEAT[3 * level + 2], 190], 4 * i);
      }
      patch.putImageData(pixels, 0, 0);
      // Few regions are blended into each other; the note below says how few they are.
      context.imageSmoothingEnabled = this.isCoarse;
      context.imageSmoothingQuality = "high";
      context.drawImage(this.patch, 0, 0, wide * width, tall * height);
    }

    outline(context, region, width, height, colour) {
      const box = this.box(region).map((share, index) => share * (index % 2 ? height : width));
      context.lineWidth = 5;
      context.strokeStyle = "#000";
      context.strokeRect(...box);
      context.lineWidth = 2.5;
      context.strokeStyle = colour;
      context.strokeRect(...box);
    }

    dot(context, region, width, height) {
      const columns = this.model.grid[1], [across, down] = this.centre(region);
      context.beginPath();
      context.arc(across * width, down * height, Math.min(9, Math.max(4, 0.18 * width / columns)), 0, 7);
      context.fillStyle = "#0072b2";
      context.strokeStyle = "#fff";
      context.lineWidth = 2;
      context.fill();
      context.stroke();
    }

    draw() {
      const {state, model, data} = this, other = 1 - state.pane;
      const source = state.shown[state.pane], target = state.shown[other];
      const seen = this.similarity(source, target, state.region), attention = this.attention(source);
      const best = source === target ? state.region : model.best[`${source}-${target}`][state.region];
      let low = 255, high = 0;
      for (const level of seen.levels) { if (level < low) low = level; if (level > high) high = level; }
      this.panes.forEach((pane, index) => {
        const image = data.images[state.shown[index]];
        const size = Math.max(image.width, 448), width = size, height = Math.round(size * image.height / image.width);
        Object.assign(pane.canvas, {width, height});
        const context = pane.canvas.getContext("2d");
        context.imageSmoothingEnabled = image.width > 96;
        const headShown = index === state.pane && state.head !== null && attention;
        context.drawImage(index === state.pane && !headShown ? image.picture : image.grey, 0, 0, width, height);
        if (index !== state.pane) this.heat(context, seen.levels, width, height, low, high);
        else if (headShown) this.heat(context, this.headLevels(attention, state.head), width, height);
        this.dot(context, model.global[state.shown[index]], width, height);
        this.outline(context, index === state.pane ? state.region : best, width, height, "#fff");
        pane.name.textContent = image.name;
        pane.canvas.setAttribute("aria-label", `${image.name}: ${this.describe(index === state.pane ? state.region : best)}`);
        [...pane.thumbs.children].forEach((button, which) => button.setAttribute("aria-pressed", which === state.shown[index]));
      });
      this.low.textContent = seen.value(low).toFixed(2);
      this.high.textContent = seen.value(high).toFixed(2);
      this.linesButton.setAttribute("aria-pressed", state.lines);
      this.drawLines(source, target);
      this.drawHeads(attention, data.images[source]);
      const coarse = `The network sees ${model.grid[0]} × ${model.grid[1]} regions of an image` +
        (this.isCoarse ? "; the colours between their centres are interpolated." : ".");
      this.notes.textContent = [coarse, ...model.notes].join(" ");
      const pinned = state.pinned ? " Pinned: click or press Enter to release." : "";
      const matched = `Best match of ${this.describe(state.region)}: ${this.describe(best)}, ` +
        `similarity ${seen.value(seen.levels[best]).toFixed(3)}.`;
      this.readout.textContent = `${matched} Blue dots: the region nearest each image’s global feature.${pinned}`;
      Object.assign(this.root.dataset, {region: state.region, best, pane: state.pane});
    }

    describe(region) {
      const columns = this.model.grid[1];
      return `row ${Math.floor(region / columns) + 1}, column ${region % columns + 1}`;
    }

    drawLines(source, target) {
      const {state, model} = this;
      this.overlay.replaceChildren();
      if (!state.lines || source === target) return;
      const key = `${Math.min(source, target)}-${Math.max(source, target)}`;
      const stage = this.stage.getBoundingClientRect();
      const where = (image, region) => {
        const box = this.panes[state.shown.indexOf(image)].canvas.getBoundingClientRect();
        const [across, down] = this.centre(region);
        return [box.left - stage.left + across * box.width, box.top - stage.top + down * box.height];
      };
      const ends = model.top[key].map(([first, second]) =>
        [where(Math.min(source, target), first), where(Math.max(source, target), second)]);
      for (const [[x1, y1], [x2, y2]] of ends)
        for (const kind of ["under", "over"]) this.overlay.append(drawing("line", {class: kind, x1, y1, x2, y2}));
      ends.forEach((pair, rank) => pair.forEach(([x, y]) => {
        this.overlay.append(drawing("circle", {cx: x, cy: y, r: 8}), drawing("text", {x, y}, rank + 1));
      }));
    }

    drawHeads(attention, image) {
      if (!attention) { this.heads.replaceChildren(); return; }
      const tokens = this.model.grid[0] * this.model.grid[1], order = this.headOrder();
      while (this.heads.children.length > order.length) this.heads.lastChild.remove();
      while (this.heads.children.length < order.length) {
        const button = element("button", {type: "button"}, element("canvas"), element("span"));
        button.addEventListener("click", () => {
          const head = +button.dataset.head;
          this.state.head = this.state.head === head ? null : head;
          this.draw();
        });
        this.heads.append(button);
      }
      const width = 112, height = Math.round(width * image.height / image.width);
      order.forEach((head, rank) => {
        const button = this.heads.children[rank], [canvas, label] = button.children;
        Object.assign(canvas, {width, height});
        const context = canvas.getContext("2d");
        context.drawImage(image.grey, 0, 0, width, height);
        this.heat(context, this.headLevels(attention, head), width, height);
        const bits = attention.entropy[head * tokens + this.state.region];
        label.textContent = `head ${head} · ${bits.toFixed(1)}`;
        button.dataset.head = head;
        button.setAttribute("aria-pressed", this.state.head === head);
        button.setAttribute("aria-label", `head ${head}, entropy ${bits.toFixed(1)} bits: show over the image`);
      });
    }
  }

  for (const root of document.querySelectorAll(".explorer")) new Explorer(root);
})();
