"use strict";
// Everything is in the page already: this shows one noise level at a time, and fills in the JSON.
(function () {
  const root = document.documentElement;
  root.classList.add("live");

  const slider = document.getElementById("level");
  if (slider) {
    const levels = Array.from(document.querySelectorAll("#levels > .level"));
    const output = document.querySelector("output[for=level]");
    const show = function () {
      const chosen = Number(slider.value);
      levels.forEach(function (level, i) { level.classList.toggle("shown", i === chosen); });
      output.textContent = levels[chosen].dataset.name + " (" + (chosen + 1) + " of " + levels.length + ")";
      slider.setAttribute("aria-valuetext", levels[chosen].dataset.name);
    };
    slider.addEventListener("input", show);
    show();
  }

  const sets = Array.from(document.querySelectorAll(".sets > .set"));
  const choices = Array.from(document.querySelectorAll("input[name=set]"));
  const choose = function () {
    sets.forEach(function (set, i) { set.classList.toggle("shown", choices.length < 2 || choices[i].checked); });
  };
  choices.forEach(function (choice) { choice.addEventListener("change", choose); });
  choose();

  const json = document.querySelector("#json details");
  if (json) {
    json.addEventListener("toggle", function () {
      const text = document.getElementById("json-text");
      if (json.open && !text.textContent) {
        const values = JSON.parse(document.getElementById("data").textContent);
        text.textContent = JSON.stringify(values, null, 1);
      }
    });
  }

  // On paper nothing can be opened: all of it is, but for the JSON.
  const paper = window.matchMedia("print");
  const closed = [];
  const unfold = function () {
    if (paper.matches) {
      document.querySelectorAll("section > details:not([open])").forEach(function (one) {
        one.open = true;
        closed.push(one);
      });
    } else {
      closed.splice(0).forEach(function (one) { one.open = false; });
    }
  };
  paper.addEventListener("change", unfold);
  unfold();
})();
