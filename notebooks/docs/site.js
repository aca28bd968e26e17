// What scrolls sideways can be reached, and scrolled, by the keyboard.
function reachable() {
  for (const each of document.querySelectorAll("pre, .cell_output, .cell_output *, .drawing, .table-wrapper")) {
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(each).overflowX);
    if (scrolls && each.scrollWidth > each.clientWidth) {
      each.tabIndex = 0;
    } else if (each.tabIndex === 0 && each.tagName !== "SUMMARY" && each.tagName !== "A") {
      each.removeAttribute("tabindex");
    }
  }
}
addEventListener("load", reachable);
addEventListener("resize", reachable);
