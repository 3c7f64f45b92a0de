"use strict";
// Filters the scenarios by the data-* of each; what is chosen stands in the address, to be passed on.
(() => {
  const form = document.getElementById("filters");
  const bodies = [...document.querySelectorAll("#corpus > tbody")];
  const fields = [...form.querySelectorAll("input, select")];
  const parts = { finding: " ", result: " ", weights: "|" };
  const fits = (data, name, value) =>
    name === "text" ? value.toLowerCase().split(/\s+/).every((word) => data.text.includes(word))
      : name in parts ? data[name].split(parts[name]).includes(value)
        : data[name] === value;
  const show = () => {
    const chosen = fields.filter((field) => field.value.trim()).map((field) => [field.name, field.value.trim()]);
    let count = 0;
    for (const body of bodies) {
      body.hidden = !chosen.every(([name, value]) => fits(body.dataset, name, value));
      count += body.hidden ? 0 : 1;
    }
    fields.forEach((field) => field.classList.toggle("set", Boolean(field.value.trim())));
    document.getElementById("shown").textContent = `${count} of ${bodies.length} scenarios`;
    document.getElementById("none").hidden = count > 0;
    history.replaceState(null, "", chosen.length ? `#${new URLSearchParams(chosen)}` : location.pathname + location.search);
  };
  const take = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const field of fields) field.value = given.get(field.name) ?? "";
    show();
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(show));
  addEventListener("hashchange", take);
  form.hidden = false;
  take();
})();
