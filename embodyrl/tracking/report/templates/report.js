(function () {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

  // Canvases know nothing of the page's style sheet: their texts and grids are coloured here.
  function colour() {
    const style = getComputedStyle(root);
    const text = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
    for (const doc of (window.Bokeh ? Bokeh.documents : [])) {
      for (const model of doc.all_models) {
        if (model.type === "LinearAxis") {
          model.setv({major_label_text_color: text, axis_label_text_color: text});
        } else if (model.type === "Grid" && model.dimension === 1) {
          model.setv({grid_line_color: line});
        } else if (model.type === "Legend") {
          model.setv({label_text_color: text});
        }
      }
    }
    const button = document.getElementById("theme");
    button.textContent = isDark() ? "light" : "dark";
  }
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    colour();
  });
  system.addEventListener("change", colour);

  // Charts whose points have a wall clock are drawn over it, or over what they began with.
  const clock = document.getElementById("clock");
  const models = () => (window.Bokeh ? Bokeh.documents : []).flatMap((doc) => [...doc.all_models]);
  const timed = () => models().filter((model) => model.type === "LinearAxis" && model.tags.length === 2);
  let overClock = false;
  function offerClock() {
    clock.hidden = timed().length === 0;
  }
  clock.addEventListener("click", () => {
    overClock = !overClock;
    for (const model of models()) {
      if (model.type === "ColumnDataSource" && model.data.minutes) {
        model.data = {...model.data, x: overClock ? model.data.minutes : model.data.steps};
      }
    }
    for (const axis of timed()) { axis.axis_label = axis.tags[overClock ? 1 : 0]; }
    clock.textContent = overClock ? timed()[0].tags[0] : "wall clock";
  });

  // One embedded video shows several episodes as tiles; each card shows its own part of it.
  for (const gallery of document.querySelectorAll(".gallery")) {
    const whole = document.getElementById(gallery.dataset.video);
    const columns = Number(gallery.dataset.columns), rows = Number(gallery.dataset.rows);
    for (const crop of gallery.querySelectorAll(".crop")) {
      const video = crop.appendChild(document.createElement("video"));
      video.muted = video.loop = video.playsInline = true;
      video.controls = false;
      video.style.width = `${100 * columns}%`;
      video.style.left = `${-100 * Number(crop.dataset.column)}%`;
      video.style.top = `${-100 * Number(crop.dataset.row)}%`;
      video.addEventListener("loadedmetadata", () => {
        crop.style.aspectRatio = `${video.videoWidth / columns} / ${video.videoHeight / rows}`;
      });
      crop.addEventListener("click", () => (video.paused ? video.play() : video.pause()));
      video.src = whole.src;
    }
    const play = gallery.parentElement.querySelector("[data-play]");
    play.addEventListener("click", () => {
      for (const video of gallery.querySelectorAll("video")) { video.currentTime = 0; video.play(); }
    });
  }

  const items = JSON.parse(document.getElementById("items").textContent);
  const drawn = Object.entries(items).map(async ([name, item]) => {
    await Bokeh.embed.embed_item(item, name);
    document.getElementById(name).dataset.drawn = "";
  });
  Promise.all(drawn).then(colour).then(offerClock);
})();
